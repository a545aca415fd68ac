# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""At one KV budget, more requests run at once with HiSparse than without.

Without it, the default full-sequence reservation keeps long prompts waiting, and
answers that outgrow the cache preempt. With it nothing is preempted, nobody waits for
memory, and no bit of any answer changes.
"""

from dataclasses import dataclass
from statistics import mean

import pytest

from engines import Engine, Engines, Generation, Step
from test_hisparse_exactness import (
    CONNECTOR,
    FORMATS,
    NEW_TOKENS,
    PROMPTS,
    TEXT,
    small_budget,
)

# 16 or 17 pages each, and no more with their answers: the budget holds three.
LONG_LENGTHS = (249, 258, 243, 261, 239)
LONG_PROMPTS = [(TEXT * 2)[start : start + n] for start, n in enumerate(LONG_LENGTHS)]
FEW_TOKENS = 16


@dataclass(frozen=True)
class Run:
    """A batch of requests: its answers, and the scheduler's steps."""

    answers: list[Generation]
    steps: list[Step]

    @property
    def preempted(self) -> int:
        return sum(step.preempted for step in self.steps)

    @property
    def most_running(self) -> int:
        return max(step.running for step in self.steps)

    @property
    def mean_running(self) -> float:
        return mean(step.running for step in self.steps)

    @property
    def most_held_back(self) -> int:
        return max(step.held_back for step in self.steps)


def run(engine: Engine, prompts: list[str], max_tokens: int) -> Run:
    answers = engine.generate(prompts, max_tokens)
    return Run(answers, list(engine.steps))


@pytest.fixture(scope="module")
def off(engines: Engines) -> Engine:
    return engines.get(**small_budget("fp32", 16))


@pytest.fixture(scope="module")
def on(engines: Engines) -> Engine:
    return engines.get(**small_budget("fp32", 16), **CONNECTOR)


@pytest.fixture(scope="module")
def long_off(off: Engine) -> Run:
    return run(off, LONG_PROMPTS, FEW_TOKENS)


@pytest.fixture(scope="module")
def long_on(on: Engine) -> Run:
    return run(on, LONG_PROMPTS, FEW_TOKENS)


def test_the_full_sequence_reservation_keeps_requests_waiting(long_off: Run) -> None:
    """The release's default: nothing is preempted, two of five wait for memory."""
    assert long_off.preempted == 0
    assert long_off.most_running == 3
    assert [step.held_back for step in long_off.steps].count(2) >= FEW_TOKENS / 2


def test_requests_that_would_wait_run_at_once(long_off: Run, long_on: Run) -> None:
    assert long_on.preempted == 0
    assert long_on.most_held_back == 0
    assert long_on.most_running == len(LONG_PROMPTS)
    assert long_on.mean_running > 1.25 * long_off.mean_running


def test_requests_that_run_at_once_keep_every_bit(
    engines: Engines, on: Engine, long_on: Run
) -> None:
    expected = engines.get(**FORMATS["fp32"]).alone(LONG_PROMPTS, FEW_TOKENS)
    for got, want in zip(long_on.answers, expected, strict=True):
        assert got.tokens == want.tokens
        assert got.logprobs == want.logprobs
    on.assert_drained()


def test_requests_that_would_be_preempted_keep_running(off: Engine, on: Engine) -> None:
    """Their answers are compared in test_hisparse_exactness."""
    without = run(off, PROMPTS, NEW_TOKENS)
    with_hisparse = run(on, PROMPTS, NEW_TOKENS)
    assert without.preempted >= 2
    assert with_hisparse.preempted == 0
    assert with_hisparse.most_running == len(PROMPTS)
    assert with_hisparse.mean_running > 1.5 * without.mean_running
