# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What the fused cache write must put where, in torch, from inputs without rounding.

The inputs are small multiples of powers of two with mean square 4, the norms have no
epsilon and all turns are by right angles, so that rows can be compared byte for byte:
no sum depends on its order, and no value is further from one of its row's format than
the last bit of a float32. The latter matters in Triton's interpreter, which rounds ties
away from zero when it narrows and loses the carry of a mantissa of ones.
"""

from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
KV_DIM, ROPE_DIM, INDEX_DIM, Q_DIM = 512, 64, 128, 64
INDEX_ROW = INDEX_DIM + 4
MAX_POSITION, TOPK = 50, 40
K_SCALE = 0.5
FLT_MIN = 1.1754943508222875e-38
# dtype of a latent cache by its kind, and elements of its rows.
LATENT_ROWS = {
    "auto": (torch.bfloat16, KV_DIM + ROPE_DIM),
    "fp8": (torch.uint8, KV_DIM + ROPE_DIM),
    "fp8_ds_mla": (torch.uint8, 656),
}
# The squares of each add up to 32.
MAGNITUDES = torch.tensor(
    [
        [4, 3, 2, 1, 1, 1, 0, 0],
        [5, 2, 1, 1, 1, 0, 0, 0],
        [3, 3, 3, 1, 1, 1, 1, 1],
    ]
).float()
# Scaled by the largest to 448, as fp8_ds_mla does it, these are values of e4m3.
POWERS = torch.tensor(
    [
        [4, 4, 0, 0, 0, 0, 0, 0],
        [4, 2, 2, 2, 2, 0, 0, 0],
        [4, 2, 2, 2, 1, 1, 1, 1],
    ]
).float()
RIGHT_ANGLES = torch.tensor([[1, 0, -1, 0], [0, 1, 0, -1]]).bfloat16()


@dataclass
class Step:
    """Inputs of `fused_norm_rope` for the T tokens of one step.

    Attributes:
        positions: int64 ``[T]``.
        q_c, kv_c, k_pe: bfloat16 ``[T, Q_DIM]``, ``[T, KV_DIM]``, ``[T, ROPE_DIM]``.
        index_k: bfloat16 ``[T, INDEX_DIM]``.
        kv_weight: bfloat16 ``[KV_DIM]``.
        index_weight, index_bias: float32 ``[INDEX_DIM]``.
        cos_sin: bfloat16 ``[MAX_POSITION, ROPE_DIM]``, cosines first.
        interleave: the indexer turns neighbours, not halves.
    """

    positions: torch.Tensor
    q_c: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    index_k: torch.Tensor
    kv_weight: torch.Tensor
    index_weight: torch.Tensor
    index_bias: torch.Tensor
    cos_sin: torch.Tensor
    interleave: bool = False

    @classmethod
    def build(cls, tokens: int, interleave: bool = False) -> "Step":
        """Inputs of some tokens; the same for the same arguments."""
        make = _Exact(tokens)
        # Slices of one wider tensor, as the model has them.
        parts = (
            make.rows(POWERS, tokens, Q_DIM),
            make.rows(POWERS, tokens, KV_DIM),
            make.integers(17, tokens, ROPE_DIM) / 4 - 2,
        )
        q_c, kv_c, k_pe = (
            torch.cat(parts, dim=1).bfloat16().split([Q_DIM, KV_DIM, ROPE_DIM], dim=1)
        )
        index_k = make.rows(MAGNITUDES, tokens, INDEX_DIM // 2)
        angles = make.integers(4, MAX_POSITION, ROPE_DIM // 2)
        return cls(
            positions=make.integers(MAX_POSITION, tokens),
            q_c=q_c,
            kv_c=kv_c,
            k_pe=k_pe,
            index_k=make.mixed(torch.cat([index_k, -index_k], dim=1)).bfloat16(),
            kv_weight=2.0 ** make.integers(5, KV_DIM).sub(2).bfloat16(),
            index_weight=2.0 ** make.integers(2, INDEX_DIM),
            index_bias=make.integers(3, INDEX_DIM) - 1.0,
            cos_sin=RIGHT_ANGLES[:, angles].transpose(0, 1).flatten(1),
            interleave=interleave,
        )

    def turned(self, x: torch.Tensor, token: int, interleave: bool) -> torch.Tensor:
        """Rotate ``x`` float64 ``[ROPE_DIM]`` by the token's position."""
        cos, sin = self.cos_sin[self.positions[token]].double().chunk(2)
        pairs = (x[0::2], x[1::2]) if interleave else x.chunk(2)
        turned = torch.complex(*pairs) * torch.complex(cos, sin)
        parts = (turned.real, turned.imag)
        return torch.stack(parts, 1).flatten() if interleave else torch.cat(parts)

    def latent_row(self, token: int, kind: str) -> torch.Tensor:
        """The bytes of a token's latent row, uint8."""
        kv = self.kv_c[token].double()
        kv = kv / kv.square().mean().sqrt() * self.kv_weight.double()
        rope = self.turned(self.k_pe[token].double(), token, interleave=True)
        if kind == "auto":
            return torch.cat([kv, rope]).bfloat16().view(torch.uint8)
        if kind == "fp8":
            return (torch.cat([kv, rope]).float() / K_SCALE).to(FP8).view(torch.uint8)
        tiles = kv.float().view(4, 128)
        scale = tiles.abs().amax(1) * torch.tensor(1 / 448, dtype=torch.float32)
        scale = scale.clamp(min=FLT_MIN)
        parts = ((tiles / scale[:, None]).to(FP8).flatten(), scale, rope.bfloat16())
        return torch.cat([part.view(torch.uint8) for part in parts])

    def indexer_row(self, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes of a token's indexer row and of its scale, uint8."""
        k = self.index_k[token].double()
        k = (k - k.mean()) / k.var(correction=0).sqrt()
        k = k * self.index_weight.double() + self.index_bias.double()
        k = torch.cat([self.turned(k[:64], token, self.interleave), k[64:]])
        # The smallest power of two by which all values fit into e4m3.
        scale = 2.0 ** (k.abs().amax() / 448).log2().ceil()
        values = (k / scale).float().to(FP8)
        return values.view(torch.uint8), scale.float().view(1).view(torch.uint8)


class _Exact:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        return torch.randint(below, shape, generator=self.generator)

    def mixed(self, rows: torch.Tensor) -> torch.Tensor:
        """Each row in an order of its own."""
        order = torch.rand(rows.shape, generator=self.generator).argsort(1)
        return rows.gather(1, order)

    def rows(self, groups: torch.Tensor, tokens: int, dim: int) -> torch.Tensor:
        """Rows with mean square 4, of groups of magnitudes with random signs."""
        x = groups[self.integers(len(groups), tokens, dim // 8)].flatten(1)
        return self.mixed(x * (self.integers(2, tokens, dim) * 2 - 1))


@dataclass
class Pages:
    """Pages of one layer: blocks ``block_bytes`` apart, from byte ``start`` of a slab.

    Attributes:
        slab: uint8 ``[bytes]``.
    """

    slab: torch.Tensor
    start: int
    block_bytes: int
    blocks: int
    block_size: int

    def view(self, dtype: torch.dtype, width: int) -> torch.Tensor:
        """``[blocks, block_size, width]`` of `dtype`."""
        size = dtype.itemsize
        assert self.start % size == self.block_bytes % size == 0
        return self.slab.view(dtype).as_strided(
            (self.blocks, self.block_size, width),
            (self.block_bytes // size, width, 1),
            self.start // size,
        )

    def write_latent(self, slab: torch.Tensor, slot: int, row: torch.Tensor) -> None:
        block, offset = divmod(slot, self.block_size)
        at = self.start + block * self.block_bytes + offset * len(row)
        slab[at : at + len(row)] = row

    def write_indexer(
        self, slab: torch.Tensor, slot: int, values: torch.Tensor, scale: torch.Tensor
    ) -> None:
        block, offset = divmod(slot, self.block_size)
        page = self.start + block * self.block_bytes
        at = page + offset * INDEX_DIM
        slab[at : at + INDEX_DIM] = values
        at = page + self.block_size * INDEX_DIM + offset * 4
        slab[at : at + 4] = scale
