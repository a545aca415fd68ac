# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Two tensor-parallel ranks, which share a host pool, under KV pressure.

The oracle has two ranks as well: they add their halves in another order than one rank
adds the whole.
"""

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engines import Engine, Engines, Generation
from test_hisparse_exactness import CONNECTOR, MTP, PROMPTS, TOKEN_BYTES

# The prompts fill 41 pages of 16 tokens, more than the device holds.
LONG_PROMPTS = [prompt for prompt in PROMPTS if len(prompt) > 140][:4]
NEW_TOKENS = 16
TWO_RANKS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_batched_tokens": 128,
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "worker_extension_cls": "rank_hooks.RankHooks",
}
SMALL_BUDGET: dict[str, Any] = {
    **TWO_RANKS,
    **CONNECTOR,
    "block_size": 16,
    "num_gpu_blocks_override": None,
    "kv_cache_memory_bytes": 44 * 16 * TOKEN_BYTES["fp32"],
}
# Imported once, before workers are forked: each would take ten seconds for it.
WORKER_MODULES = (
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu.model_runner",
    "vllm.model_executor.models.deepseek_v2",
)
LATE_STEPS = 4


@dataclass(frozen=True)
class Run:
    """A batch of requests under pressure.

    Attributes:
        answers: By prompt.
        misses: Rows that each rank fetched from the host pool.
        acks: Acknowledgements in the order in which they came: transfer, ranks, and
            whether its page became clean.
    """

    answers: list[Generation]
    misses: list[int]
    acks: list[tuple[int, frozenset[int], bool]]


@pytest.fixture(scope="module")
def rank_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines whose workers are forked from a process that has imported vLLM."""
    pytest.importorskip("vllm", reason="needs the patched vLLM")
    import zmq
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.v1.executor import multiproc_executor

    def queue_context() -> zmq.Context:
        queue_contexts.append(zmq.Context())
        return queue_contexts[-1]

    queue_contexts: list[zmq.Context] = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(WORKER_MODULES))
    engines = Engines(tmp_path_factory.mktemp("two-ranks"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiproc_executor, "get_mp_context", lambda: context)
        patch.setattr(shm_broadcast, "Context", queue_context)
        yield engines
        engines.end_workers()
        # A message that no worker took would keep this process from ending.
        for queue in queue_contexts:
            queue.destroy(linger=0)


@pytest.fixture(scope="module")
def expected(rank_engines: Engines) -> list[Generation]:
    """HiSparse off, ample memory."""
    return rank_engines.get(**TWO_RANKS).generate(LONG_PROMPTS, NEW_TOKENS)


@pytest.fixture(scope="module")
def on(rank_engines: Engines) -> Engine:
    return rank_engines.get(**SMALL_BUDGET)


def run(engine: Engine, delay_steps: tuple[int, int]) -> Run:
    """Generate with write-backs that complete late, by rank."""
    rpc, residency = engine.llm.collective_rpc, engine.residency
    rpc("hisparse_delay", args=(delay_steps,))
    acknowledge, acks = residency.acknowledge, []

    def acknowledge_and_record(transfer_id, ranks) -> bool:
        is_clean = acknowledge(transfer_id, ranks)
        acks.append((transfer_id, frozenset(ranks), is_clean))
        return is_clean

    before = rpc("hisparse_misses")
    residency.acknowledge = acknowledge_and_record
    answers = engine.generate(LONG_PROMPTS, NEW_TOKENS)
    assert engine.num_preemptions == 0
    engine.assert_drained()
    del residency.acknowledge
    misses = [new - old for new, old in zip(rpc("hisparse_misses"), before)]
    return Run(answers, misses, acks)


@pytest.fixture(scope="module")
def late(on: Engine) -> Run:
    """The second rank's write-backs are late."""
    return run(on, (0, LATE_STEPS))


def assert_exact(actual: Run, expected: list[Generation]) -> None:
    assert len(actual.misses) == 2
    assert min(actual.misses) > 0, "no rank, or only one, read the host pool"
    for got, want in zip(actual.answers, expected, strict=True):
        assert got.tokens == want.tokens
        assert got.logprobs == want.logprobs


def test_pressure_changes_no_bit(on: Engine, expected: list[Generation]) -> None:
    assert_exact(run(on, (0, 0)), expected)


def test_a_late_rank_changes_no_bit(late: Run, expected: list[Generation]) -> None:
    assert_exact(late, expected)


def test_ranks_that_end_different_copies_in_a_step_change_no_bit(
    on: Engine, expected: list[Generation]
) -> None:
    on.llm.collective_rpc("hisparse_leave_out", args=(True,))
    uneven = run(on, (0, 0))
    on.llm.collective_rpc("hisparse_leave_out", args=(False,))
    assert_exact(uneven, expected)
    assert {len(ranks) for _, ranks, _ in uneven.acks} == {1, 2}


def test_a_late_rank_changes_no_bit_with_drafts_in_flight(
    rank_engines: Engines, expected: list[Generation]
) -> None:
    engine = rank_engines.get(
        **{**SMALL_BUDGET, "max_num_batched_tokens": 48},
        speculative_config=MTP,
        async_scheduling=True,
    )
    assert_exact(run(engine, (0, LATE_STEPS)), expected)


def test_a_page_is_clean_when_both_ranks_acknowledged(late: Run) -> None:
    """The first rank's word alone never makes a page clean (R1)."""
    first = {t: clean for t, ranks, clean in late.acks if ranks == {0}}
    second = {t: clean for t, ranks, clean in late.acks if ranks == {1}}
    assert first and not any(first.values())
    assert second.keys() == first.keys() and all(second.values())
    assert len(late.acks) == 2 * len(first)


def test_prefixes_come_back_from_what_both_ranks_wrote(
    on: Engine, expected: list[Generation]
) -> None:
    on.generate(LONG_PROMPTS, NEW_TOKENS)
    before = on.residency.num_host_hits
    again = on.generate(LONG_PROMPTS, NEW_TOKENS, forget=False)
    assert on.residency.num_host_hits > before
    for got, want in zip(again, expected, strict=True):
        assert got.tokens == want.tokens
        assert got.logprobs == want.logprobs


def test_ranks_share_one_host_pool(on: Engine) -> None:
    """Its file has no name any more, so it goes with the ranks, however they end."""
    first, second = on.llm.collective_rpc("hisparse_host_file")
    assert first == second and first[1] != "0"
    named = {str(os.stat(path).st_ino) for path in Path("/dev/shm").iterdir()}
    assert first[1] not in named


def test_each_layer_is_written_back_by_one_rank(on: Engine) -> None:
    first, second = on.llm.collective_rpc("hisparse_written_layers")
    plan = on.core.scheduler.kv_cache_config.plan.device
    assert first and second
    assert sorted(first + second) == sorted(layer.name for layer in plan.host_layers)


def test_the_pool_holds_what_it_would_hold_for_one_rank(on: Engine) -> None:
    transfer: dict[str, Any] = CONNECTOR["kv_transfer_config"]
    pool_gib = transfer["kv_connector_extra_config"]["host_pool_gib"]
    config = on.core.scheduler.kv_cache_config
    page_bytes = config.plan.device.host_page_bytes
    assert config.num_blocks == int(pool_gib * (1 << 30)) // page_bytes
