# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""A layer's rows in a pool whose blocks hold other layers too, and a dense copy.

The pool is NaN wherever it is not the layer's own: 0xFF in every byte is NaN as
float8_e4m3fn, bfloat16 and float32. A kernel that computes a wrong address therefore
gives NaN, or other rows than from the dense copy. Only the null block is zero, as in
a pool that serves: kernels may read it for a row that is not there.
"""

from dataclasses import dataclass

import torch

from under_test import DEVICE, ON_GPU, needs_memory

BLOCK_SIZE = 64
PAGES = 40
NAN = 0xFF
LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE


@dataclass(frozen=True)
class Kind:
    """How a layer's rows look.

    Attributes:
        row_bytes: Of a row.
        block_bytes: Of a block of the pool, as planned for GLM-5.3.
        dtype: Of the view that the attention gets.
    """

    row_bytes: int
    block_bytes: int
    dtype: torch.dtype


KINDS = {
    "fp8_ds_mla": Kind(656, 209_920, torch.uint8),
    "bf16": Kind(1152, 294_912, torch.bfloat16),
    "fp8": Kind(576, 186_048, torch.float8_e4m3fn),
    # Page of an indexer: 64 x 128 values, then 64 scales.
    "indexer": Kind(132, 209_920, torch.uint8),
}


class PaddedPool:
    """Pages of one layer in blocks far apart, and the same pages side by side.

    Args:
        kind: Key of KINDS.
        num_blocks: Of the pool; the last one has a page.
        num_pages: Pages of the layer.
        device: Where the pool lies.
        layer: Place of the layer in a block.

    Attributes:
        blocks: int32 ``[num_pages]``, on the CPU.
        padded: The layer's view of the pool, ``[num_blocks, 64, width]``.
        dense: The same pages, ``[num_pages, 64, width]``, contiguous.
    """

    def __init__(
        self,
        kind: str,
        num_blocks: int,
        num_pages: int,
        device: torch.device,
        layer: int = 2,
    ) -> None:
        self.kind = KINDS[kind]
        row_bytes, dtype = self.kind.row_bytes, self.kind.dtype
        generator = torch.Generator().manual_seed(num_blocks)
        # The first block, the last, and those around 2**31 and 2**32 bytes.
        edges = [
            (1 << bits) // self.kind.block_bytes + i
            for bits in (31, 32)
            for i in (0, 1)
        ]
        wanted = [1, *(b for b in edges if 1 < b < num_blocks - 1), num_blocks - 1]
        others = 2 + torch.randperm(num_blocks - 3, generator=generator)
        others = others[~torch.isin(others, torch.tensor(wanted))]
        blocks = torch.cat([torch.tensor(wanted), others])[:num_pages]
        self.blocks = blocks[torch.randperm(num_pages, generator=generator)].int()
        pages = _pages(kind, num_pages, generator).to(device)
        self.slab = torch.full(
            (num_blocks, self.kind.block_bytes), NAN, dtype=torch.uint8, device=device
        )
        page_bytes = BLOCK_SIZE * row_bytes
        self.slab[0] = 0
        # The layer's part of a block.
        self._own = slice(layer * page_bytes, (layer + 1) * page_bytes)
        own = self.slab[:, self._own]
        own[self.blocks.long().to(device)] = pages.view(num_pages, -1)
        size = dtype.itemsize
        self.padded = torch.as_strided(
            self.slab.view(dtype),
            (num_blocks, BLOCK_SIZE, row_bytes // size),
            (self.kind.block_bytes // size, row_bytes // size, 1),
            layer * page_bytes // size,
        )
        self.dense = pages.view(dtype).view(num_pages, BLOCK_SIZE, -1)

    def stray_bytes(self) -> int:
        """How many bytes are written that are not in the layer's own pages."""
        is_written = self.slab != NAN
        is_written[0] = self.slab[0] != 0
        is_written[:, self._own][self.blocks.long().to(self.slab.device)] = False
        return int(is_written.sum())

    def pick(self, tokens: int, top_k: int, holes: bool) -> tuple[torch.Tensor, ...]:
        """Rows that tokens select, by page and offset.

        Args:
            tokens: Query tokens.
            top_k: Entries of each.
            holes: Whether -1 may stand anywhere, or behind the others only.

        Returns:
            Page int32 ``[tokens, top_k]``, offset, both -1 for padding, and int32
            ``[tokens]`` how many there are.
        """
        generator = torch.Generator().manual_seed(tokens)
        total = len(self.blocks) * BLOCK_SIZE
        rows = torch.stack(
            [torch.randperm(total, generator=generator)[:top_k] for _ in range(tokens)]
        )
        absent = torch.rand(rows.shape, generator=generator) < 0.1
        absent = absent if holes else absent.sort(1).values
        page = (rows // BLOCK_SIZE).masked_fill(absent, -1).int()
        offset = (rows % BLOCK_SIZE).masked_fill(absent, -1).int()
        return page, offset, (~absent).sum(1).int()

    def flat_ids(
        self, page: torch.Tensor, offset: torch.Tensor, stride: int, padded: bool
    ) -> torch.Tensor:
        """Row ids ``block * stride + offset``, or by page for the dense copy."""
        block = self.blocks[page.long().clamp(min=0)] if padded else page
        ids = block * stride + offset
        return ids.masked_fill(page < 0, -1).int().to(self.dense.device)

    def values(self, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        """Selected rows as float32 ``[tokens, top_k, 576]`` on the CPU, 0 for none."""
        picked = self.dense.cpu()[page.long().clamp(min=0), offset.long().clamp(min=0)]
        return values_of(picked, self.kind).masked_fill((page < 0).unsqueeze(-1), 0.0)


def pool_of(kind: str) -> PaddedPool:
    """A pool of more than 2**32 bytes, or a small one where no kernel will see it."""
    if not ON_GPU:
        return PaddedPool(kind, 50, PAGES, DEVICE)
    needs_memory(24 << 30)
    return PaddedPool(kind, 24_000, PAGES, DEVICE)


def _pages(kind: str, num_pages: int, generator: torch.Generator) -> torch.Tensor:
    """Bytes of random pages, ``[num_pages, page bytes]``."""
    shape = (num_pages, BLOCK_SIZE)

    def normal(width: int) -> torch.Tensor:
        return torch.randn(*shape, width, generator=generator)

    def scales(width: int) -> torch.Tensor:
        return 0.5 + torch.rand(*shape, width, generator=generator)

    if kind == "bf16":
        parts = [normal(WIDTH).bfloat16()]
    elif kind == "fp8":
        parts = [normal(WIDTH).to(torch.float8_e4m3fn)]
    elif kind == "indexer":
        values = normal(128).to(torch.float8_e4m3fn).view(torch.uint8)
        own = [values.flatten(1), scales(1).view(torch.uint8).flatten(1)]
        return torch.cat(own, 1)
    else:
        values = normal(LATENT).to(torch.float8_e4m3fn)
        parts = [values, scales(4), normal(ROPE).bfloat16()]
    rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
    return rows.flatten(1)


def values_of(rows: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Rows as numbers: float32 ``[..., 576]``."""
    if kind.row_bytes != 656:
        return rows.float()
    rows = rows.contiguous()
    values = rows[..., :LATENT].contiguous().view(torch.float8_e4m3fn).float()
    scales = rows[..., LATENT : LATENT + 16].contiguous().view(torch.float32)
    rope = rows[..., LATENT + 16 :].contiguous().view(torch.bfloat16).float()
    return torch.cat([values * scales.repeat_interleave(128, -1), rope], -1)


def attention(
    q: torch.Tensor, rows: torch.Tensor, page: torch.Tensor, scale: float
) -> torch.Tensor:
    """Sparse MLA attention in float32: ``[tokens, heads, 512]``.

    Args:
        q: ``[tokens, heads, 576]``.
        rows: float32 ``[tokens, top_k, 576]``.
        page: -1 where there is no row.
        scale: Of the scores.
    """
    scores = torch.einsum("thd,tkd->thk", q.float().cpu(), rows) * scale
    scores.masked_fill_((page < 0).unsqueeze(1), float("-inf"))
    return torch.einsum("thk,tkd->thd", scores.softmax(-1), rows[..., :LATENT])


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """1 - cosine-like similarity; 0 for equal tensors."""
    one, other = one.double().cpu(), other.double().cpu()
    return float(1 - 2 * (one * other).sum() / (one * one + other * other).sum())
