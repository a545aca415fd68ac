# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The same prompt gives the same bits, however the engine got there.

Every later proof of exactness compares log-probabilities bit for bit and stands on
this: alone, in a batch, in chunks, preempted, from the prefix cache, speculating.
"""

import pytest

from engines import Engine, Engines, Generation

# Lengths below, at and above a block of 64 and the top-k of 32, not multiples.
PROMPTS = [
    "The quick brown fox jumps over the lazy dog, and then once more. " * 3,
    "abc",
    "0123456789" * 7,
    "Sparse attention reads only the rows that its indexer picked.\n" * 2,
]
NEW_TOKENS = 20

FORMATS = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "fp8_ds_mla": {"dtype": "float32", "kv_cache_dtype": "fp8_ds_mla"},
}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}


@pytest.fixture(scope="module", params=FORMATS)
def kv_format(request: pytest.FixtureRequest) -> dict:
    return FORMATS[request.param]


@pytest.fixture(scope="module")
def engine(engines: Engines, kv_format: dict) -> Engine:
    return engines.get(**kv_format)


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[Generation]:
    """Each prompt alone, with ample memory and nothing cached."""
    return engine.alone(PROMPTS, NEW_TOKENS)


def assert_same(actual: list[Generation], expected: list[Generation]) -> None:
    for got, want in zip(actual, expected, strict=True):
        assert got.tokens == want.tokens
        assert got.logprobs == want.logprobs


def test_prompts_give_different_outputs(expected: list[Generation]) -> None:
    """Comparisons mean something: no two prompts agree, and tokens vary."""
    assert len({g.logprobs for g in expected}) == len(PROMPTS)
    assert len({token for g in expected for token in g.tokens}) > NEW_TOKENS


def test_batch_equals_alone(engine: Engine, expected: list[Generation]) -> None:
    assert_same(engine.generate(PROMPTS, NEW_TOKENS), expected)


def test_prefix_hits_equal_alone(engine: Engine, expected: list[Generation]) -> None:
    engine.generate(PROMPTS, NEW_TOKENS)
    again = engine.generate(PROMPTS, NEW_TOKENS, forget=False)
    assert max(g.num_cached_tokens for g in again) >= 128
    assert_same(again, expected)


def test_small_chunks_equal_alone(
    engines: Engines, kv_format: dict, expected: list[Generation]
) -> None:
    budget = 48
    engine = engines.get(**kv_format, max_num_batched_tokens=budget)
    assert len(PROMPTS[0]) > 2 * budget
    assert_same(engine.generate(PROMPTS, NEW_TOKENS), expected)


def test_preempted_equals_alone(
    engines: Engines, kv_format: dict, expected: list[Generation]
) -> None:
    # The four prompts fit into 28 blocks of 16 tokens (one more is the null block);
    # with their answers they want 31.
    engine = engines.get(
        **kv_format, block_size=16, max_model_len=256, num_gpu_blocks_override=29
    )
    assert_same(engine.generate(PROMPTS, NEW_TOKENS), expected)
    assert engine.num_preemptions > 0


def test_mtp_equals_alone(
    engines: Engines, kv_format: dict, expected: list[Generation]
) -> None:
    engine = engines.get(**kv_format, **MTP)
    assert_same(engine.generate(PROMPTS, NEW_TOKENS), expected)
    drafted = engine.counter("vllm:spec_decode_num_draft_tokens")
    accepted = engine.counter("vllm:spec_decode_num_accepted_tokens")
    assert 0.1 * drafted < accepted < drafted


def test_mtp_preempted_and_chunked_equals_alone(
    engines: Engines, kv_format: dict, expected: list[Generation]
) -> None:
    engine = engines.get(
        **kv_format,
        **MTP,
        block_size=16,
        max_model_len=256,
        num_gpu_blocks_override=29,
        max_num_batched_tokens=48,
    )
    assert_same(engine.generate(PROMPTS, NEW_TOKENS), expected)
    assert engine.num_preemptions > 0
