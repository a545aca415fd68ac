# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Copies that fail, or never end: requests go on, and nothing is lost or wrong."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator

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
    mend(engine)
    yield engine
    mend(engine)


def mend(engine: Engine) -> None:
    engine.delay_copies(0)
    for queue in (engine.copier.to_host, engine.copier.to_device):
        queue.fails = queue.never = lambda transfer_id: False


def give_up_after_steps(
    engine: Engine, steps: int, monkeypatch: pytest.MonkeyPatch
) -> set:
    """Let a step take a second; returns names of directions that are given up."""
    manager, residency = (
        engine.core.scheduler.kv_cache_manager.hisparse,
        engine.residency,
    )
    seconds = itertools.count()
    monkeypatch.setattr(manager, "_clock", lambda: float(next(seconds)))
    monkeypatch.setattr(manager, "_timeout_s", float(steps))
    monkeypatch.setattr(manager, "_steps", deque())
    found: set = set()
    give_up = residency.give_up_overdue

    def recorded(before_id: int) -> set:
        ways = give_up(before_id)
        found.update(way.name for way in ways)
        return ways

    monkeypatch.setattr(residency, "give_up_overdue", recorded)
    return found


def num_held_pages(engine: Engine) -> int:
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


def at_most(steps: int) -> Callable[[], None]:
    """A hook that ends a test in which no request gets on any more."""
    count = itertools.count()

    def hook() -> None:
        assert next(count) < steps, "requests do not get on"

    return hook


def equal(engine: Engine, expected: list) -> bool:
    actual = engine.generate(PROMPTS, ANSWER, each_step=at_most(5_000))
    return all(g.same_output(w) for g, w in zip(actual, expected, strict=True))


def test_copies_that_fail_are_tried_again(engine: Engine, expected: list) -> None:
    before, misses = engine.residency.num_failed, engine.hot_misses
    engine.copier.to_host.fails = lambda transfer_id: transfer_id % 3 == 0
    assert equal(engine, expected)
    assert engine.residency.num_failed > before
    assert engine.hot_misses > misses, "no page went to the host"
    engine.copier.to_host.fails = lambda transfer_id: False
    engine.assert_drained()


def test_pages_that_can_never_be_copied_stay_on_the_device(
    engine: Engine, expected: list
) -> None:
    before, misses = engine.residency.num_failed, engine.hot_misses
    engine.copier.to_host.fails = lambda transfer_id: True
    assert equal(engine, expected)
    assert engine.residency.num_failed > before + 3 * 10
    assert engine.hot_misses == misses
    engine.assert_drained()


def test_copies_that_never_end_are_not_waited_for(
    engine: Engine, expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up = give_up_after_steps(engine, 8, monkeypatch)
    engine.copier.to_host.never = lambda transfer_id: True
    assert equal(engine, expected)
    assert "TO_HOST" in given_up
    assert num_held_pages(engine) == len(engine.residency.abandoned_pages) > 0
    # They end after all: nothing is left held.
    mend(engine)
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
    engine.delay_copies(0)
    engine.generate(PROMPTS[:3], 2)
    for _ in range(3):
        engine.llm.llm_engine.step()
    evict_all(engine.residency)
    engine.residency.num_lost = 0
    yield engine
    mend(engine)


def cached_tokens(engine: Engine, expected: list, chosen: tuple[int, ...]) -> list[int]:
    """Prompt tokens that were not computed, of prompts that have the right answers."""
    prompts, limit = [PROMPTS[i] for i in chosen], at_most(5_000)
    got = engine.generate(prompts, ANSWER, forget=False, each_step=limit)
    assert all(g.same_output(expected[i]) for i, g in zip(chosen, got, strict=True))
    return [generation.num_cached_tokens for generation in got]


def test_requests_whose_restores_fail_compute_what_is_lost(
    restoring: Engine, expected: list
) -> None:
    """The last prompt is new."""
    engine = restoring
    first = engine.residency.transfers.next_id
    engine.copier.to_device.fails = lambda transfer_id: (
        transfer_id - first in (2, 3, 12, 13)
    )
    # The first prompt's ten pages come first; with drafts the last hit is not used.
    drafts = engine.runner.vllm_config.speculative_config is not None
    cached = cached_tokens(engine, expected, (0, 2, 5))
    assert cached == [(2 - drafts) * 16, 2 * 16, 0]
    assert engine.residency.num_lost == 4
    assert engine.num_preemptions == 0
    stats = engine.core.scheduler.connector.get_kv_connector_stats()
    assert stats.data["lost_pages"] == 4
    engine.assert_drained()


def test_requests_get_on_when_every_restore_fails(
    restoring: Engine, expected: list
) -> None:
    engine = restoring
    misses = engine.hot_misses
    engine.copier.to_device.fails = lambda transfer_id: True
    assert not any(cached_tokens(engine, expected, tuple(range(len(PROMPTS)))))
    assert engine.residency.num_lost >= 17
    assert engine.hot_misses > misses, "no page went to the host"
    engine.assert_drained()


def test_restores_that_never_end_are_not_waited_for(
    restoring: Engine, expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = restoring
    given_up = give_up_after_steps(engine, 8, monkeypatch)
    engine.copier.to_device.never = lambda transfer_id: True
    assert cached_tokens(engine, expected, (0, 2, 5)) == [0, 0, 0]
    assert given_up == {"TO_DEVICE"}
    held = engine.residency.abandoned_pages
    # The other prompt's pages are not even asked for.
    assert 0 < num_held_pages(engine) == len(held) < engine.residency.num_lost
    mend(engine)
    for _ in range(3):
        engine.llm.generate([PROMPTS[1]], use_tqdm=False)
    engine.assert_drained()


def test_a_request_that_is_aborted_while_its_pages_come_leaves_nothing_behind(
    restoring: Engine,
) -> None:
    from vllm import SamplingParams

    engine = restoring
    engine.delay_copies(5)
    core = engine.llm.llm_engine
    for name, prompt in (("900010", PROMPTS[0]), ("900011", PROMPTS[5])):
        core.add_request(name, prompt, SamplingParams(max_tokens=9))
    for _ in range(3):
        core.step()
    assert len(engine.residency._claims) == 1 and not engine.core.scheduler.running
    core.abort_request(["900010"])
    assert not engine.residency._claims
    # Who was behind it goes on.
    core.step()
    assert len(engine.core.scheduler.running) == 1
    core.abort_request(["900011"])
    engine.assert_drained()
