# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""At one KV budget, more requests run at once with HiSparse than without.

Without it, the default full-sequence reservation keeps long prompts waiting, and
answers that outgrow the cache preempt. With it nothing is preempted, nobody waits for
memory, and no bit of any answer changes.
"""

import itertools
import re
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


@pytest.mark.parametrize("hot_rows", [64, 128])
def test_the_smallest_pool_that_start_up_allows_serves_the_longest_request(
    engines: Engines, hot_rows: int
) -> None:
    """Without prefix caching: a preempted request would start from zero, for ever."""
    longest, answer = 192, 27
    sizes = {"device_buffer_size": hot_rows}
    options = {
        **FORMATS["fp32"],
        **CONNECTOR,
        "attention_config": {"hisparse_config": sizes},
        "block_size": 16,
        "max_model_len": longest,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
    }
    with pytest.raises(ValueError, match="at least [0-9]+ blocks") as refusal:
        engines.get(**options, num_gpu_blocks_override=2)
    (least,) = re.findall("at least ([0-9]+) blocks", str(refusal.value))
    engine = engines.get(**options, num_gpu_blocks_override=int(least))
    prompt = (TEXT * 2)[: longest - answer - 1]
    steps = itertools.count()

    def take_no_more_steps_than_tokens() -> None:
        assert next(steps) < longest, "it is preempted again and again"

    (got,) = engine.generate(
        [prompt], answer, forget=False, each_step=take_no_more_steps_than_tokens
    )
    assert engine.num_preemptions == 0
    (want,) = engines.get(**FORMATS["fp32"]).alone([prompt], answer)
    assert got.same_output(want)
