# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What the kernels are compared with: the plain index conversion, and ceilings.

The conversion is vLLM 0.29's own where vLLM can be imported, else a kernel of the same
work: a block table, no residency, no hot rows.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

# Fills `out`, int32 [T, K], and `valid`, int32 [T], unless that is None.
Conversion = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"],
    None,
]


@triton.jit
def _convert_kernel(
    owner_ptr,
    table_ptr,
    positions_ptr,
    out_ptr,
    valid_ptr,
    num_pages,
    BLOCK_SIZE: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    COUNT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    entry = token * K + tl.program_id(1) * TILE + tl.arange(0, TILE)
    request = tl.load(owner_ptr + token).to(tl.int64)
    pos = tl.load(positions_ptr + entry)
    page = pos // BLOCK_SIZE
    is_there = (pos >= 0) & (page < num_pages)
    block = tl.load(table_ptr + request * num_pages + page, mask=is_there, other=0)
    row = tl.where(is_there, block * BLOCK_SIZE + pos % BLOCK_SIZE, -1)
    tl.store(out_ptr + entry, row)
    if COUNT:
        tl.store(valid_ptr + token, tl.sum(is_there.to(tl.int32), 0))


def own_conversion(
    owner: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    valid: torch.Tensor | None,
) -> None:
    """Physical rows by block table, tiled as vLLM tiles its conversion.

    Args:
        owner: int32 ``[T]``, request of each token.
        table: int32 ``[B, P]``.
        positions: int32 ``[T, K]``, K a power of two.
        out: int32 ``[T, K]``, written.
        valid: int32 ``[T]``, written; None: not wanted.
    """
    tokens, top_k = positions.shape
    tile = min(128, top_k) if valid is None else top_k
    _convert_kernel[(tokens, top_k // tile)](
        owner, table, positions, out, valid, table.shape[1],
        BLOCK_SIZE=64, K=top_k, TILE=tile, COUNT=valid is not None,
        num_warps=4 if valid is None else 8,
    )  # fmt: skip


def plain_conversion() -> tuple[str, Conversion]:
    """The conversion to compare with, and whose it is."""
    try:
        from vllm.v1.attention.backends.mla import sparse_utils
    except Exception as error:  # an installation that cannot be imported, too
        name = type(error).__name__
        return f"a kernel of the same work (vLLM: {name})", own_conversion

    def theirs(owner, table, positions, out, valid) -> None:
        # It makes its outputs itself.
        sparse_utils.triton_convert_req_index_to_global_index(
            owner, table, positions, BLOCK_SIZE=64, NUM_TOPK_TOKENS=positions.shape[1],
            BLOCK_N=min(128, positions.shape[1]), return_valid_counts=valid is not None,
        )  # fmt: skip

    import vllm

    return f"vLLM {vllm.__version__}", theirs


@triton.jit
def _gather_kernel(
    rows_ptr,
    host_ptr,
    out_ptr,
    num_chunks,
    ROW_CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    word = tl.arange(0, 4)
    for first in range(tl.program_id(0) * TILE, num_chunks, tl.num_programs(0) * TILE):
        chunk = first + tl.arange(0, TILE)
        lane = chunk < num_chunks
        entry = chunk // ROW_CHUNKS
        row = tl.load(rows_ptr + entry, mask=lane, other=0).to(tl.int64)
        source = row * ROW_CHUNKS + chunk - entry * ROW_CHUNKS
        words = tl.load(
            host_ptr + (source * 4)[:, None] + word[None, :],
            mask=lane[:, None],
            other=0,
        )
        target = out_ptr + (chunk.to(tl.int64) * 4)[:, None] + word[None, :]
        tl.store(target, words, mask=lane[:, None])


def gather_rows(
    rows: torch.Tensor, host: torch.Tensor, out: torch.Tensor, programs: int
) -> None:
    """Copy rows of host memory side by side: a fetch without a plan.

    Args:
        rows: int32 ``[N]``.
        host: uint8 ``[host rows, row_bytes]``, pinned.
        out: uint8 ``[N, row_bytes]``, written.
        programs: Of the launch.
    """
    chunks = host.shape[1] // 16
    _gather_kernel[(programs,)](
        rows, host.view(torch.int32), out.view(torch.int32), len(rows) * chunks,
        ROW_CHUNKS=chunks, TILE=512, num_warps=4,
    )  # fmt: skip
