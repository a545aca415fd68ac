# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What the checks of libraries rest on: a pool that shows a wrong read or write."""

import pytest
import torch

from padded_pools import BLOCK_SIZE, LATENT, WIDTH, attention, pool_of
from under_test import DEVICE


@pytest.mark.parametrize("kind", ["fp8_ds_mla", "bf16", "fp8"])
def test_ids_of_the_padded_view_name_the_rows_of_the_dense_copy(kind) -> None:
    pool = pool_of(kind)
    page, offset, _ = pool.pick(2, 300, holes=True)
    flat_stride = pool.kind.block_bytes // pool.kind.row_bytes
    ids = pool.flat_ids(page, offset, flat_stride, padded=True).long()
    size = pool.kind.dtype.itemsize
    width = pool.kind.row_bytes // size
    start = pool.padded.storage_offset()
    flat = pool.slab.view(pool.kind.dtype).flatten()[start:].unfold(0, width, width)
    there = page >= 0
    got = flat[ids[there.to(DEVICE)]].contiguous().view(torch.uint8).cpu()
    want = pool.dense.cpu()[page[there].long(), offset[there].long()]
    assert torch.equal(got, want.contiguous().view(torch.uint8))
    q = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(4))
    out = attention(q, pool.values(page, offset), page, 192**-0.5)
    assert out.shape == (2, 4, LATENT) and not out.isnan().any()
    # One row further, or behind another page: the outcome differs, or is NaN.
    for wrong in (ids + 1, ids + BLOCK_SIZE):
        got = flat[wrong[there.to(DEVICE)]].contiguous().view(torch.uint8).cpu()
        assert not torch.equal(got, want.contiguous().view(torch.uint8))


@pytest.mark.parametrize("kind", ["bf16", "indexer"])
def test_a_byte_that_is_written_beside_the_layers_pages_is_a_stray(kind) -> None:
    pool = pool_of(kind)
    assert pool.stray_bytes() == 0
    pool.padded.view(torch.uint8)[pool.blocks[0]] = 7
    assert pool.stray_bytes() == 0, "these are the layer's own"
    first = pool.padded.storage_offset() * pool.kind.dtype.itemsize
    behind = first + BLOCK_SIZE * pool.kind.row_bytes
    without_page = next(b for b in range(1, 50) if b not in pool.blocks.tolist())
    strays = (
        (pool.blocks[0], first - 1),
        (pool.blocks[1], behind),
        (pool.blocks[2], pool.kind.block_bytes - 1),
        (without_page, first),
        (0, first),
    )
    for number, (block, byte) in enumerate(strays, 1):
        pool.slab[block, byte] = 7
        assert pool.stray_bytes() == number, (block, byte)
