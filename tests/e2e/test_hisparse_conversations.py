# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Conversations over growing prefixes that the host keeps (D9, D15, R7).

Several clients hold conversations of many turns: a long first turn and short ones
behind it. The device holds a fraction of them. Every turn starts from what the host
still has, and its output is that of HiSparse off with ample memory.
"""

from typing import Any

import pytest

from engines import Engine, Engines
from test_hisparse_exactness import CONNECTOR, FORMATS, small_budget

# As published with the feature: the pool in hisparse_config, and a connector beside it
# whose CPU tier joins it. Three to one, as 384 GiB to 128.
PUBLISHED: dict[str, Any] = {
    "attention_config": {"hisparse_config": {"host_pool_gib": 0.03}},
    "kv_transfer_config": {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [
                {
                    "kv_connector": "OffloadingConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"cpu_bytes_to_use": 10 << 20},
                }
            ]
        },
    },
}
CLIENTS, TURNS, FIRST, NEXT, ANSWER = 4, 13, 150, 11, 8


def first_turn(client: int) -> list[int]:
    return [4 + (7 * i + 31 * client + i * i // 5) % 250 for i in range(FIRST)]


def next_turn(client: int, turn: int) -> list[int]:
    return [4 + (13 * i + 17 * client + 29 * turn) % 250 for i in range(NEXT)]


def converse(engine: Engine) -> list[list]:
    """All clients, turn by turn; generations by turn and client."""
    prompts = [first_turn(client) for client in range(CLIENTS)]
    assert engine.llm.reset_prefix_cache()
    turns = []
    for turn in range(1, TURNS + 1):
        answers = engine.generate(prompts, ANSWER, forget=False)
        assert engine.num_preemptions == 0
        turns.append(answers)
        for client, answer in enumerate(answers):
            prompts[client] = [
                *prompts[client],
                *answer.tokens,
                *next_turn(client, turn),
            ]
    return turns


@pytest.fixture(scope="module")
def with_ample_memory(engines: Engines) -> list[list]:
    return converse(engines.get(**FORMATS["fp32"], block_size=16))


@pytest.mark.parametrize("name", ["alone", "as published"])
def test_turns_start_from_what_the_host_has(
    engines: Engines, with_ample_memory: list[list], name: str
) -> None:
    options = {"alone": CONNECTOR, "as published": PUBLISHED}[name]
    engine = engines.get(**small_budget("fp32", 16), **options)
    residency = engine.residency
    host_hits = residency.num_host_hits
    turns = converse(engine)
    for turn, (got, want) in enumerate(zip(turns, with_ample_memory, strict=True)):
        for client in range(CLIENTS):
            assert got[client].same_output(want[client]), (turn, client)
    assert residency.num_host_hits > host_hits, "no prefix was on the host only"
    cached, ample = (
        sum(answer.num_cached_tokens for turn in run for answer in turn)
        for run in (turns, with_ample_memory)
    )
    assert ample > 10_000
    assert cached >= 0.95 * ample
    engine.assert_drained()
