# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""A damaged cache shows in the output; an undamaged one brings it back.

Greedy text of a small random model can hide damage, so log-probabilities are
compared. Without this control, "bit-identical" would prove little.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engines import Engine, Engines, Generation

PROMPT = "A lost row must show in the numbers, or the comparison proves nothing. " * 4
NEW_TOKENS = 4
BLOCK_SIZE = 64


@pytest.fixture(scope="module", params=["auto", "fp8_ds_mla"])
def engine(engines: Engines, request: pytest.FixtureRequest) -> Engine:
    # The last layers follow layer 5, so the selection of the last leader is the one
    # that is left in the buffer, for both kinds.
    return engines.get({"layers": 8}, kv_cache_dtype=request.param)


@pytest.fixture(scope="module")
def blocks(engine: Engine) -> list[int]:
    """The prompt's blocks; they stay in the prefix cache for all tests."""
    return engine.blocks_of_next(PROMPT)


def rerun(engine: Engine) -> Generation:
    """The prompt again, on the cached blocks."""
    (generation,) = engine.generate([PROMPT], NEW_TOKENS, forget=False)
    assert generation.num_cached_tokens == len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE
    return generation


@contextmanager
def zeroed(cache: torch.Tensor) -> Iterator[None]:
    """Zero a view of a cache for a while."""
    saved = cache.clone()
    assert saved.count_nonzero() > 0
    cache.zero_()
    try:
        yield
    finally:
        cache.copy_(saved)


def indexer_of(attention_layer: str) -> str:
    """Name of the indexer cache of an attention layer."""
    return attention_layer.replace(".attn", ".indexer.k_cache")


def attention_layers(engine: Engine) -> list[str]:
    return [name for name in engine.layers if name.endswith(".attn")]


def leaders(engine: Engine) -> list[str]:
    return [n for n in attention_layers(engine) if indexer_of(n) in engine.layers]


def followers(engine: Engine) -> list[str]:
    return [n for n in attention_layers(engine) if indexer_of(n) not in engine.layers]


def test_model_has_leaders_and_followers(engine: Engine) -> None:
    assert len(leaders(engine)) >= 2
    assert attention_layers(engine)[-1] == followers(engine)[-1]


@pytest.mark.parametrize("kind", [leaders, followers])
def test_zeroed_row_changes_the_output(engine: Engine, blocks: list[int], kind) -> None:
    before = rerun(engine)
    layer = engine.layers[kind(engine)[-1]]
    # A row that the last token selected, from a block that is read from the cache.
    selected = layer.impl.topk_indices_buffer[0]
    cached = selected[(selected >= 0) & (selected < before.num_cached_tokens)]
    position = int(cached[0])
    row = layer.kv_cache[blocks[position // BLOCK_SIZE], position % BLOCK_SIZE]
    with zeroed(row):
        assert not rerun(engine).same_output(before)
    assert rerun(engine).same_output(before)


def test_zeroed_indexer_page_changes_the_output(
    engine: Engine, blocks: list[int]
) -> None:
    before = rerun(engine)
    indexer = engine.layers[indexer_of(leaders(engine)[-1])]
    with zeroed(indexer.kv_cache[blocks[1]]):
        assert not rerun(engine).same_output(before)
    assert rerun(engine).same_output(before)


def test_row_of_another_request_does_not_matter(
    engine: Engine, blocks: list[int]
) -> None:
    """The control's own control: damage elsewhere changes nothing."""
    before = rerun(engine)
    layer = engine.layers[leaders(engine)[-1]]
    unused = max(blocks) + 40
    assert unused < layer.kv_cache.shape[0]
    layer.kv_cache[unused].fill_(1)
    assert rerun(engine).same_output(before)
