# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Logical plan codes to physical rows of further stacks or another row convention.

`lookup` and `assign` write the rows of the stacks they are given. This translation
serves what comes later, without looking up again: it reads codes, not the LRU.
"""

import torch
import triton
import triton.language as tl

from . import checks
from .owner import owner_of
from .shapes import entry_tile, row_warps, token_tile
from .tensors import CODE_HOT, NO_ROW, HotBlocks, Residency


@triton.jit(do_not_specialize=["num_tokens", "num_requests"])
def _translate_kernel(
    code_ptr,
    token_request_ptr,
    state_row_ptr,
    frame_blocks_ptr,
    mixed_row_ptr,
    hot_blocks_ptr,
    overflow_blocks_ptr,
    stacks_ptr,
    rows_ptr,
    num_tokens,
    num_requests,
    code_stride,
    rows_stack_stride,
    rows_stride,
    block_stride_rows,
    K: tl.constexpr,
    H: tl.constexpr,
    HB: tl.constexpr,
    OB: tl.constexpr,
    G: tl.constexpr,
    NS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    in_step = token < num_tokens
    token = token.to(tl.int64)
    k = tl.program_id(1) * TILE + tl.arange(0, TILE)
    lane = in_step[:, None] & (k < K)[None, :]
    entry = (token * code_stride)[:, None] + k[None, :]
    code = tl.load(code_ptr + entry, mask=lane, other=-1)
    _, state = owner_of(token_request_ptr, state_row_ptr, token, in_step, num_requests)
    mixed = tl.load(mixed_row_ptr + state, mask=state >= 0, other=-1)
    is_mixed = (mixed >= 0)[:, None]
    mixed64 = mixed.to(tl.int64)[:, None]

    is_resident = (code >= 0) & (state >= 0)[:, None]
    index = -code + CODE_HOT
    is_hot = (index >= 0) & (index < H) & is_mixed
    over = index - H
    is_over = (over >= 0) & (over < OB * BLOCK_SIZE) & is_mixed
    over_block = tl.load(
        overflow_blocks_ptr + mixed64 * OB + over // BLOCK_SIZE, mask=is_over, other=0
    )
    offset = tl.where(is_resident, code, tl.where(is_over, over, index)) % BLOCK_SIZE
    frame = code // BLOCK_SIZE
    for i in tl.static_range(NS):
        stack = tl.load(stacks_ptr + i)
        block = tl.load(
            frame_blocks_ptr + frame * (1 + G) + 1 + stack, mask=is_resident, other=0
        )
        hot_block = tl.load(
            hot_blocks_ptr + (mixed64 * G + stack) * HB + index // BLOCK_SIZE,
            mask=is_hot,
            other=0,
        )
        row = (block + hot_block + over_block) * block_stride_rows + offset
        row = tl.where(is_resident | is_hot | is_over, row, -1)
        entry = (token * rows_stride)[:, None] + k[None, :]
        tl.store(rows_ptr + i * rows_stack_stride + entry, row, mask=lane)


def translate(
    code: torch.Tensor,
    token_request: torch.Tensor,
    state_row: torch.Tensor,
    residency: Residency,
    hot: HotBlocks,
    stacks: torch.Tensor,
    rows: torch.Tensor,
    *,
    hot_rows: int,
    block_size: int,
    block_stride_rows: int,
    tile: int | None = None,
    tokens: int | None = None,
) -> None:
    """Write the physical rows of a logical plan for some stacks.

    Args:
        code: int32 ``[T, K]`` from `lookup`, completed by `assign` where it runs.
        token_request: int32 ``[T]``. Batch row; values outside 0..B-1 are padding.
        state_row: int32 ``[B]``. State row, -1 for a padded request.
        residency: Page tables.
        hot: Leased blocks.
        stacks: int32 ``[NS]`` on the device.
        rows: int32 ``[NS, T, K]``, out. Physical row; -1 for padding and for misses.
        hot_rows: H.
        block_size: Tokens of a page, a power of two.
        block_stride_rows: Rows from one block of a layer's view to the next.
        tile: Entries per program, a power of two.
        tokens: Tokens per program, a power of two.

    Raises:
        ValueError: With checks enabled: a shape or dtype differs.
    """
    num_tokens, top_k = code.shape
    tile = entry_tile(code.device, top_k, tile)
    tokens = token_tile(code.device, num_tokens, tile, tokens)
    if checks.ENABLED:
        width = residency.frame_blocks.shape[1]
        checks.expect("code", code, torch.int32, None, None)
        checks.expect("token_request", token_request, torch.int32, num_tokens)
        checks.expect("stacks", stacks, torch.int32, None)
        checks.expect("rows", rows, torch.int32, stacks.shape[0], num_tokens, top_k)
        checks.expect("hot_blocks", hot.hot_blocks, torch.int32, None, width - 1, None)
    if num_tokens == 0:
        return
    _translate_kernel[(triton.cdiv(num_tokens, tokens), triton.cdiv(top_k, tile))](
        code,
        token_request,
        state_row,
        residency.frame_blocks,
        residency.mixed_row,
        hot.hot_blocks,
        hot.overflow_blocks,
        stacks,
        rows,
        num_tokens,
        state_row.shape[0],
        code.stride(0),
        rows.stride(0),
        rows.stride(1),
        block_stride_rows,
        K=top_k,
        H=hot_rows,
        HB=hot.hot_blocks.shape[2],
        OB=hot.overflow_blocks.shape[1],
        G=hot.hot_blocks.shape[1],
        NS=stacks.shape[0],
        BLOCK_SIZE=block_size,
        TILE=tile,
        TOKENS=tokens,
        num_warps=row_warps(tile),
    )


def translate_reference(
    code: torch.Tensor,
    token_request: torch.Tensor,
    state_row: torch.Tensor,
    residency: Residency,
    hot: HotBlocks,
    stacks: torch.Tensor,
    rows: torch.Tensor,
    *,
    hot_rows: int,
    block_size: int,
    block_stride_rows: int,
) -> None:
    """`translate` in torch, with the same arguments and effects."""
    for token, request in enumerate(token_request.tolist()):
        for i, stack in enumerate(stacks.tolist()):
            rows[i, token] = NO_ROW
            state = int(state_row[request]) if 0 <= request < len(state_row) else -1
            if state < 0:
                continue
            mixed = int(residency.mixed_row[state])
            value = code[token].long()
            blocks = residency.frame_blocks[:, 1 + stack]
            picked = value >= 0
            if picked.any():
                frame = value[picked] // block_size
                row = blocks[frame] * block_stride_rows + value[picked] % block_size
                rows[i, token, picked] = row.int()
            index = CODE_HOT.value - value
            picked = (index >= 0) & (index < hot_rows)
            if mixed >= 0 and picked.any():
                block = hot.hot_blocks[mixed, stack, index[picked] // block_size]
                row = block * block_stride_rows + index[picked] % block_size
                rows[i, token, picked] = row.int()
            index = index - hot_rows
            picked = (index >= 0) & (index < hot.overflow_blocks.shape[1] * block_size)
            if mixed >= 0 and picked.any():
                block = hot.overflow_blocks[mixed, index[picked] // block_size]
                row = block * block_stride_rows + index[picked] % block_size
                rows[i, token, picked] = row.int()
