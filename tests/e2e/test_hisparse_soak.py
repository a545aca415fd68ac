# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Random traffic over pools that are always short: nothing leaks, no bit changes.

Requests of random lengths with shared prefixes come, are aborted, finish; copies are
late and out of order, or fail; the prefix cache is reset now and then. `nox -s soak`
runs it with many more requests (HISPARSE_SOAK_REQUESTS).
"""

import os
import time
from random import Random

import pytest

from engines import Engine, Engines
from test_hisparse_exactness import CONNECTOR, FORMATS, TOKEN_BYTES, small_budget

REQUESTS = int(os.environ.get("HISPARSE_SOAK_REQUESTS", "60"))
SEED = int(os.environ.get("HISPARSE_SOAK_SEED", "1"))
KINDS, ANSWER, AT_ONCE = 24, 14, 7
HOST_PAGES = 100


def prompts() -> list[list[int]]:
    """Prompts of which every other one begins like an earlier one."""
    random = Random(5)
    made: list[list[int]] = []
    for kind in range(KINDS):
        head = made[random.randrange(kind)] if kind % 2 else []
        head = head[: random.randrange(len(head) + 1)]
        length = random.choice((3, 17, 40, 90, 150, 230))
        made.append([*head, *(random.randrange(4, 250) for _ in range(length))][:300])
    return made


@pytest.fixture(scope="module")
def expected(engines: Engines) -> list:
    return engines.get(**FORMATS["fp32"]).generate(prompts(), ANSWER)


def host_pool(pages: int) -> dict:
    """The connector with a host pool of so many pages of 16 tokens."""
    page_bytes = 16 * TOKEN_BYTES["fp32"]
    extra = {"host_pool_gib": pages * page_bytes / (1 << 30)}
    ours = CONNECTOR["kv_transfer_config"]
    return {"kv_transfer_config": {**ours, "kv_connector_extra_config": extra}}


class Soak:
    """Feeds an engine and looks at what comes out."""

    def __init__(self, engine: Engine, expected: list, seed: int) -> None:
        self.engine, self.expected, self.random = engine, expected, Random(seed)
        self.core = engine.llm.llm_engine
        self.prompts = prompts()
        self.kinds: dict[str, int] = {}
        self.num_added = self.num_finished = self.num_aborted = 0

    def add(self) -> None:
        from vllm import SamplingParams

        kind = self.random.randrange(KINDS)
        params = SamplingParams(
            temperature=0, max_tokens=ANSWER, logprobs=0, ignore_eos=True
        )
        name = f"soak-{self.num_added}"
        self.num_added += 1
        self.core.add_request(name, {"prompt_token_ids": self.prompts[kind]}, params)
        self.kinds[name] = kind

    def abort(self) -> None:
        name = self.random.choice(sorted(self.kinds))
        del self.kinds[name]
        self.core.abort_request([name])
        self.num_aborted += 1

    def disturb(self) -> None:
        random = self.random
        order = random.random()
        self.engine.delay_copies(
            random.choice((0, 0, 1, 3, 9)),
            lambda due: sorted(due, key=lambda t: (t * order) % 1),
        )
        if random.random() < 0.02:
            self.engine.llm.reset_prefix_cache()

    def step(self) -> None:
        from vllm.v1.hisparse.integrity import check_integrity

        for output in self.core.step():
            if not output.finished or output.request_id not in self.kinds:
                continue
            want = self.expected[self.kinds.pop(output.request_id)]
            (completion,) = output.outputs
            tokens = tuple(completion.token_ids)
            assert tokens == want.tokens, output.request_id
            pairs = zip(completion.logprobs, tokens, strict=True)
            got = tuple(step[token].logprob for step, token in pairs)
            assert got == want.logprobs, output.request_id
            self.num_finished += 1
        check_integrity(self.engine.residency)

    def run(self, requests: int) -> None:
        idle, shown, start = 0, 0, time.monotonic()
        while self.num_added < requests or self.kinds:
            while len(self.kinds) < AT_ONCE and self.num_added < requests:
                self.add()
                if self.random.random() < 0.3:
                    break
            if self.kinds and self.random.random() < 0.02:
                self.abort()
            self.disturb()
            before = self.num_finished, self.num_added, self.num_aborted
            self.step()
            unchanged = before == (self.num_finished, self.num_added, self.num_aborted)
            idle = idle + 1 if unchanged else 0
            assert idle < 600, "no request has finished for 600 steps"
            if self.num_finished * 20 // requests > shown:
                shown = self.num_finished * 20 // requests
                seconds = time.monotonic() - start
                print(f"{5 * shown:3d} % of {requests} requests, {seconds:.0f} s")
        self.engine.delay_copies(0)


WAYS = {
    "short host pool": host_pool(HOST_PAGES),
    "async": {**CONNECTOR, "async_scheduling": True},
    "restores fail": {**host_pool(HOST_PAGES), "async_scheduling": True},
}


@pytest.mark.parametrize("name", WAYS)
def test_nothing_leaks_and_no_bit_changes(
    engines: Engines, expected: list, name: str
) -> None:
    engine = engines.get(**small_budget("fp32", 16), **WAYS[name])
    soak = Soak(engine, expected, SEED)
    engine.copier.to_device.fails = lambda transfer_id: (
        name == "restores fail" and soak.random.random() < 0.1
    )
    lost = engine.residency.num_lost
    soak.run(REQUESTS)
    assert (engine.residency.num_lost > lost) == (name == "restores fail")
    assert soak.num_finished + soak.num_aborted == REQUESTS
    assert soak.num_finished > REQUESTS // 2
    engine.assert_drained()
