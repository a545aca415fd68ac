# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""HiSparse under KV pressure gives the bits of HiSparse off with ample memory.

One KV budget: without HiSparse it preempts, or keeps requests waiting; with HiSparse
cold pages go to the host and everybody keeps running.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from engines import Engine, Engines, Generation

NEW_TOKENS = 48
TEXT = (
    "Cold pages live in host memory; what the indexer picks is fetched row by row. "
    "The same tokens, the same numbers, to the last bit: 0123456789 abcdefghij. "
)
# Neither multiples of a page nor of each other, one below the top-k.
LENGTHS = (163, 20, 151, 147, 158, 139)
PROMPTS = [(TEXT * 2)[start : start + n] for start, n in enumerate(LENGTHS)]

CONNECTOR: dict[str, Any] = {
    "kv_transfer_config": {
        "kv_connector": "HiSparseConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_pool_gib": 0.25},
    }
}
FORMATS: dict[str, dict] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "fp8_ds_mla": {"dtype": "float32", "kv_cache_dtype": "fp8_ds_mla"},
}
# Bytes of a token in all latents and indexers of the tiny GLM, by format.
TOKEN_BYTES = {
    "fp32": 6 * 2304 + 3 * 132,
    "bf16": 6 * 1152 + 3 * 132,
    "fp8_ds_mla": 6 * 656 + 3 * 132,
}
# The prompts fill 52 pages of 16 tokens; with their answers they want 70.
BUDGET_TOKENS = 54 * 16


@dataclass(frozen=True)
class Case:
    """One way to run the same requests.

    Attributes:
        format: Key of FORMATS.
        options: Further engine options.
        hot_rows: `device_buffer_size`, or None for the default.
        delay_steps: Steps by which write-backs complete late.
        use_kernels: Whether slots and tables come from the kernels, as on a GPU.
    """

    format: str
    options: dict[str, object] = field(default_factory=dict)
    hot_rows: int | None = None
    delay_steps: int = 0
    use_kernels: bool = False


def small_budget(name: str, block_size: int) -> dict:
    """Engine options with a KV budget that is too small for all requests."""
    return {
        **FORMATS[name],
        "block_size": block_size,
        "max_model_len": 512,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": BUDGET_TOKENS * TOKEN_BYTES[name],
    }


@pytest.fixture(scope="module")
def expected(engines: Engines):
    """HiSparse off, ample memory, each prompt alone."""

    def get(name: str) -> list[Generation]:
        if name not in known:
            known[name] = engines.get(**FORMATS[name]).alone(PROMPTS, NEW_TOKENS)
        return known[name]

    known: dict[str, list[Generation]] = {}
    return get


def with_hisparse(engines: Engines, case: Case) -> Engine:
    options = {**small_budget(case.format, 16), **CONNECTOR, **case.options}
    if case.hot_rows:
        sizes = {"device_buffer_size": case.hot_rows}
        options["attention_config"] = {"hisparse_config": sizes}
    engine = engines.get(**options)
    engine.delay_copies(
        case.delay_steps, lambda due: due[::-1] if case.delay_steps else due
    )
    engine.runner.block_tables.tables.use_kernels = case.use_kernels
    return engine


@pytest.mark.parametrize("name", FORMATS)
def test_the_budget_is_too_small_without_hisparse(
    engines: Engines, name: str, expected
) -> None:
    engine = engines.get(**small_budget(name, 16))
    engine.generate(PROMPTS, NEW_TOKENS)
    assert engine.num_preemptions >= 2


WITHIN_MULTI_CONNECTOR: dict[str, object] = {
    "kv_transfer_config": {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(CONNECTOR.values())},
    }
}
MTP = {"method": "mtp", "num_speculative_tokens": 3}
CASES = {
    "fp32": Case("fp32"),
    "smallest-hot-buffer": Case("fp32", hot_rows=32),
    "late-by-one": Case("fp32", delay_steps=1),
    "late-by-three-async": Case("fp32", {"async_scheduling": True}, delay_steps=3),
    "late-by-thirty": Case("fp32", delay_steps=30),
    "pages-of-64": Case("fp32", {"block_size": 64}),
    "chunks-of-24": Case("fp32", {"max_num_batched_tokens": 24}),
    "mtp-3": Case("fp32", {"speculative_config": MTP}),
    "kernels-mtp-3": Case("fp32", {"speculative_config": MTP}, use_kernels=True),
    "within-multi-connector": Case("fp32", WITHIN_MULTI_CONNECTOR),
    "bf16": Case("bf16"),
    "fp8-ds-mla-late-by-one": Case("fp8_ds_mla", delay_steps=1),
}


@pytest.mark.parametrize("name", CASES)
def test_pressure_changes_no_bit(engines: Engines, name: str, expected) -> None:
    case = CASES[name]
    engine = with_hisparse(engines, case)
    misses = engine.hot_misses
    actual = engine.generate(PROMPTS, NEW_TOKENS)
    assert engine.num_preemptions == 0
    assert engine.hot_misses > misses, "no page went to the host: no pressure"
    for got, want in zip(actual, expected(case.format), strict=True):
        assert got.tokens == want.tokens
        assert got.logprobs == want.logprobs
    engine.assert_drained()


def test_a_warm_up_leaves_nothing_behind(
    engines: Engines, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's worker runs steps of its own before the first, without connectors."""
    from vllm.v1.hisparse.runtime import resolver
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    engine = with_hisparse(engines, Case("fp32", {"max_num_seqs": 6}, use_kernels=True))
    worker = engine.core.model_executor.driver_worker.worker
    with monkeypatch.context() as patch:
        # Only on the CPU are faults looked at within a step.
        patch.setattr(resolver, "check_faults", lambda cells: None)
        warmup_kernels(engine.runner, worker.execute_model, worker.sample_tokens)
    assert engine.worker.buffers.faults.any(), "its rows have no frames"
    actual = engine.generate(PROMPTS, NEW_TOKENS)
    assert engine.hot_misses > 0
    for got, want in zip(actual, expected("fp32"), strict=True):
        assert got.same_output(want)
    engine.assert_drained()


def test_state_rows_and_hot_rows_are_reused(engines: Engines, expected) -> None:
    """Other requests, on the rows and blocks that the first ones left."""
    engine = with_hisparse(engines, CASES["fp32"])
    others = [prompt[::-1] for prompt in PROMPTS]
    engine.generate(others, NEW_TOKENS)
    misses = engine.hot_misses
    again = engine.generate(PROMPTS, NEW_TOKENS, forget=False)
    assert engine.hot_misses > misses
    for got, want in zip(again, expected("fp32"), strict=True):
        assert got.same_output(want)
    hits = engine.generate(PROMPTS, NEW_TOKENS, forget=False)
    assert max(g.num_cached_tokens for g in hits) >= 128
    for got, want in zip(hits, expected("fp32"), strict=True):
        assert got.same_output(want)
    engine.assert_drained()


def evict_all(residency) -> None:
    """What pressure does: every request gets a lease, and all clean pages go."""
    for request in residency._requests.values():
        if request.lease is None:
            residency._grant_lease(request)
    num_blocks = residency.num_free
    residency._blocks.give_back(residency._take(num_blocks))


@pytest.mark.parametrize("capacity", [None, 2], ids=["staged", "slow way"])
def test_a_prompt_goes_on_over_pages_that_went_to_the_host(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, capacity: int | None
) -> None:
    """It comes in small chunks, and loses its pages after each of them."""
    from vllm.v1.hisparse.runtime import parts

    prompts = [(TEXT * 2)[5:235], (TEXT * 2)[70:240]]
    engine = with_hisparse(engines, CASES["chunks-of-24"])
    brought: dict[str, int] = dict.fromkeys(("StagedPart", "HotPart"), 0)
    for kind in brought:
        part = getattr(parts, kind)

        def bring(self, layer, kind=kind, original=part.bring) -> None:
            # Decodes begin with the first token of the step.
            brought[kind] += kind == "StagedPart" or self.tokens.start > 0
            original(self, layer)

        monkeypatch.setattr(part, "bring", bring)
    # Blocks lie idle here; pages must not come back into them.
    monkeypatch.setattr(engine.residency, "restore_some", lambda: None)
    if capacity is not None:
        for unit in engine.worker.units:
            monkeypatch.setattr(unit._staging, "capacity", capacity)
    want = engines.get(**FORMATS["fp32"]).alone(prompts, 12)
    actual = engine.generate(prompts, 12, each_step=lambda: evict_all(engine.residency))
    assert brought["StagedPart" if capacity is None else "HotPart"] > 0, brought
    for got, right in zip(actual, want, strict=True):
        assert got.same_output(right)
    engine.assert_drained()
