# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Copies to the host that fail, or never end: requests go on, and nothing is lost."""

import itertools
from collections.abc import Iterator

import pytest

from engines import Engine, Engines
from test_hisparse_exactness import CONNECTOR, FORMATS, PROMPTS, small_budget

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
