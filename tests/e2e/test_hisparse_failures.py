# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Copies that fail, or never end: requests go on, and nothing is lost or wrong."""

import itertools
from collections.abc import Iterator

import pytest

from engines import Engine, Engines
from test_hisparse_exactness import (
    CONNECTOR,
    FORMATS,
    MTP,
    PROMPTS,
    evict_all,
    small_budget,
)

ANSWER = 24


@pytest.fixture(scope="module")
def expected(engines: Engines) -> list:
    return engines.get(**FORMATS["fp32"]).alone(PROMPTS, ANSWER)


@pytest.fixture
def engine(engines: Engines) -> Iterator[Engine]:
    """An engine whose copies a test may spoil; mended afterwards."""
    engine = engines.get(**small_budget("fp32", 16), **CONNECTOR)
    copies = engine.copier.engine
    saved = copies.fails, copies.never
    copies.delay_steps = 0
    yield engine
    copies.fails, copies.never = saved


def equal(engine: Engine, expected: list) -> bool:
    actual = engine.generate(PROMPTS, ANSWER)
    return all(g.same_output(w) for g, w in zip(actual, expected, strict=True))


def test_copies_that_fail_are_tried_again(engine: Engine, expected: list) -> None:
    before, misses = engine.residency.num_failed, engine.hot_misses
    engine.copier.engine.fails = lambda transfer_id: transfer_id % 3 == 0
    assert equal(engine, expected)
    assert engine.residency.num_failed > before
    assert engine.hot_misses > misses, "no page went to the host"
    engine.copier.engine.fails = lambda transfer_id: False
    engine.assert_drained()


def test_pages_that_can_never_be_copied_stay_on_the_device(
    engine: Engine, expected: list
) -> None:
    before, misses = engine.residency.num_failed, engine.hot_misses
    engine.copier.engine.fails = lambda transfer_id: True
    assert equal(engine, expected)
    assert engine.residency.num_failed > before + 3 * 10
    assert engine.hot_misses == misses
    engine.assert_drained()


def test_copies_that_never_end_are_not_waited_for(
    engine: Engine, expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = engine.core.scheduler.kv_cache_manager.hisparse
    seconds = itertools.count()
    monkeypatch.setattr(manager, "_clock", lambda: float(next(seconds)))
    monkeypatch.setattr(manager, "_timeout_s", 8.0)
    stalls = []
    stall = engine.residency.stall

    def recorded() -> None:
        stalls.append(engine.residency.num_pending)
        stall()

    monkeypatch.setattr(engine.residency, "stall", recorded)
    engine.copier.engine.never = lambda transfer_id: True
    assert equal(engine, expected)
    assert stalls and stalls[0] > 0
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    assert held == len(engine.residency._abandoned) > 0
    # They end after all: nothing is left held.
    engine.copier.engine.never = lambda transfer_id: False
    for _ in range(3):
        engine.llm.generate([PROMPTS[1]], use_tqdm=False)
    engine.assert_drained()


# --- copies from the host ---------------------------------------------------------

WAYS: dict[str, dict] = {
    "step by step": {},
    "asynchronous": {"async_scheduling": True},
    "drafts": {"speculative_config": MTP},
}


@pytest.fixture(params=WAYS)
def restoring(engines: Engines, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine that finds the first three prompts on the host only."""
    options = {**small_budget("fp32", 16), **CONNECTOR, **WAYS[request.param]}
    engine = engines.get(**options)
    copies = engine.copier.engine
    saved = copies.refuses
    copies.delay_steps = 0
    engine.generate(PROMPTS[:3], 2)
    for _ in range(3):
        engine.llm.llm_engine.step()
    evict_all(engine.residency)
    engine.residency._failed_restores = 0
    yield engine
    copies.refuses = saved


def test_requests_whose_restores_fail_are_recomputed(
    restoring: Engine, expected: list
) -> None:
    """The first copy of all fails; the last prompt is new, and goes on."""
    engine, chosen = restoring, (0, 2, 5)
    calls: list[bool] = []

    def first_only() -> bool:
        calls.append(not calls)
        return calls[-1]

    engine.copier.engine.refuses = first_only
    lost = engine.residency.num_lost
    got = engine.generate([PROMPTS[i] for i in chosen], ANSWER, forget=False)
    assert all(g.same_output(expected[i]) for i, g in zip(chosen, got, strict=True))
    # All whole pages of two prompts; with drafts the last one is computed again.
    drafts = engine.runner.vllm_config.speculative_config is not None
    assert engine.residency.num_lost == lost + 10 + 9 - 2 * drafts
    assert engine.num_preemptions == 2
    stats = engine.core.scheduler.connector.get_kv_connector_stats()
    assert stats.data["lost_pages"] == engine.residency.num_lost
    engine.assert_drained()


def test_requests_get_on_when_every_restore_fails(
    restoring: Engine, expected: list
) -> None:
    engine = restoring
    misses = engine.hot_misses
    engine.copier.engine.refuses = lambda: True
    got = engine.generate(PROMPTS, ANSWER, forget=False)
    assert all(g.same_output(w) for g, w in zip(got, expected, strict=True))
    assert engine.residency._failed_restores >= 1
    assert engine.hot_misses > misses, "no page went to the host"
    engine.assert_drained()
