# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Sessions whose input comes in pieces: they keep their pages while they wait.

A session that goes on gets a place among the running requests anew, and with it
another row of the workers' tables.
"""

import time
from collections import defaultdict
from typing import Any, SupportsIndex

import pytest

from engines import Engine, Engines
from test_hisparse_exactness import (
    CONNECTOR,
    FORMATS,
    MTP,
    PROMPTS,
    small_budget,
)

WAYS: dict[str, dict[str, Any]] = {
    "step by step": {},
    "asynchronous": {"async_scheduling": True},
    "drafts": {"speculative_config": MTP},
}
SESSIONS, PIECES, FIRST, NEXT, ANSWER = 3, 3, 150, 21, 5


def piece_of(session: int, turn: int) -> list[int]:
    length = NEXT if turn else FIRST
    return [4 + (7 * i + 31 * session + 57 * turn) % 250 for i in range(length)]


class InTurn(list):
    """Free rows of the runner, the one that has been free for longest first.

    vLLM takes the latest: a session would get the row again that it had.
    """

    def pop(self, index: SupportsIndex = 0) -> int:
        return super().pop(index)


class Streams:
    """Sessions of one engine.

    Attributes:
        outputs: Tokens and their log-probabilities by session.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._client = engine.llm.llm_engine.engine_core
        self.outputs: dict[str, list] = defaultdict(list)

    def send(self, name: str, tokens: list[int], is_last: bool = False) -> None:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        params = SamplingParams(
            temperature=0, max_tokens=ANSWER, logprobs=0, ignore_eos=True
        )
        self._client.add_request(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=list(tokens),
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
                resumable=not is_last,
            )
        )

    def run(self) -> None:
        """Step until every session waits for input."""
        scheduler = self._engine.core.scheduler
        while scheduler.running or scheduler.get_num_unfinished_requests():
            for output in self._client.get_output().outputs:
                logprobs = output.new_logprobs
                values = [] if logprobs is None else logprobs.logprobs[:, 0].tolist()
                self.outputs[output.request_id] += zip(output.new_token_ids, values)


def hold_sessions(engine: Engine, others: bool) -> dict[str, list]:
    """All sessions, piece by piece; outputs by name.

    Args:
        engine: From an empty cache.
        others: Whether other requests take the memory between the pieces.
    """
    assert engine.llm.reset_prefix_cache()
    streams = Streams(engine)
    for turn in range(PIECES):
        order = range(SESSIONS) if turn % 2 else reversed(range(SESSIONS))
        for session in order:
            streams.send(f"session {session}", piece_of(session, turn))
            # One at a time, then all at once.
            if turn == 1:
                streams.run()
        streams.run()
        if others:
            engine.generate(PROMPTS[2:], 24, forget=False)
    for session in range(SESSIONS):
        streams.send(f"session {session}", [0], is_last=True)
    engine.llm.llm_engine.engine_core.get_output()
    return streams.outputs


@pytest.mark.parametrize("name", WAYS)
def test_sessions_go_on_over_pages_that_went_to_the_host(
    engines: Engines, name: str
) -> None:
    # With drafts, vLLM keeps another part of an answer.
    ample = engines.get(**FORMATS["fp32"], block_size=16, **WAYS[name])
    want = hold_sessions(ample, others=False)
    engine = engines.get(**small_budget("fp32", 16), **CONNECTOR, **WAYS[name])
    engine.delay_copies(0)
    rows = engine.runner.req_states
    rows.free_indices = InTurn(rows.free_indices)
    misses = engine.hot_misses
    got = hold_sessions(engine, others=True)
    assert set(got) == set(want) and len(want) == SESSIONS
    assert {len(output) for output in want.values()} == {PIECES * ANSWER}
    for session in sorted(want):
        assert got[session] == want[session], session
    assert engine.hot_misses > misses, "no page of a session went to the host"
    engine.assert_drained()
