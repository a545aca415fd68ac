# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Top-k positions to physical rows, wherever the rows are (D22).

`lookup` replaces the backend's index conversion. A batch without mixed requests needs
nothing else, and then its rows equal those of the plain conversion.
"""

import torch
import triton
import triton.language as tl

from . import checks
from .owner import owner_of
from .shapes import entry_tile, row_warps, token_tile
from .tensors import (
    CODE_HOT,
    CODE_MISS,
    CODE_PADDING,
    FAULT_NO_FRAME,
    NO_FRAME,
    HotBlocks,
    HotUnit,
    Residency,
)
from .translate import translate_reference


@triton.jit(
    do_not_specialize=["num_tokens", "num_requests"],
    # These may begin anywhere in a longer tensor.
    do_not_specialize_on_alignment=["state_row_ptr", "valid_ptr"],
)
def _lookup_kernel(
    positions_ptr,
    token_request_ptr,
    state_row_ptr,
    page_frame_ptr,
    frame_blocks_ptr,
    mixed_row_ptr,
    pos_slot_ptr,
    hot_blocks_ptr,
    stacks_ptr,
    rows_ptr,
    code_ptr,
    used_ptr,
    valid_ptr,
    faults_ptr,
    num_tokens,
    num_requests,
    num_pages,
    max_positions,
    positions_stride,
    code_stride,
    rows_stack_stride,
    rows_stride,
    block_stride_rows,
    K: tl.constexpr,
    H: tl.constexpr,
    HB: tl.constexpr,
    G: tl.constexpr,
    NS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    COUNT_VALID: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    in_step = token < num_tokens
    token = token.to(tl.int64)
    k = tl.program_id(1) * TILE + tl.arange(0, TILE)
    lane = in_step[:, None] & (k < K)[None, :]
    entry = (token * positions_stride)[:, None] + k[None, :]
    pos = tl.load(positions_ptr + entry, mask=lane, other=-1)
    request, state = owner_of(
        token_request_ptr, state_row_ptr, token, in_step, num_requests
    )
    mixed = tl.load(mixed_row_ptr + state, mask=state >= 0, other=-1)
    is_live = (state >= 0)[:, None]
    is_mixed = (mixed >= 0)[:, None]
    state64 = state.to(tl.int64)[:, None]
    mixed64 = mixed.to(tl.int64)[:, None]

    page = pos // BLOCK_SIZE
    offset = pos - page * BLOCK_SIZE
    valid = (pos >= 0) & is_live & (page < num_pages)
    in_map = valid & is_mixed & (pos < max_positions)
    # Both loads are issued before either is used: one round trip.
    frame = tl.load(page_frame_ptr + state64 * num_pages + page, mask=valid, other=-1)
    slot = tl.load(
        pos_slot_ptr + mixed64 * max_positions + pos, mask=in_map, other=-1
    ).to(tl.int32)
    is_resident = frame >= 0
    is_hot = in_map & (frame < 0) & (slot >= 0)
    is_miss = in_map & (frame < 0) & (slot < 0)

    code = tl.where(is_miss, CODE_MISS, CODE_PADDING)
    code = tl.where(is_hot, -slot + CODE_HOT, code)
    code = tl.where(is_resident, frame * BLOCK_SIZE + offset, code)
    entry = (token * code_stride)[:, None] + k[None, :]
    tl.store(code_ptr + entry, code, mask=lane)
    # Rows of one request may mark the same slot: all of them write 1.
    used = used_ptr + request.to(tl.int64)[:, None] * H + slot
    one = tl.full([TOKENS, TILE], 1, tl.int32)
    tl.store(used, one.to(tl.int8), mask=is_hot)
    is_lost = (pos >= 0) & is_live & (code == CODE_PADDING)
    tl.store(faults_ptr + FAULT_NO_FRAME + (one - 1), one, mask=is_lost)
    if COUNT_VALID:
        count = tl.sum((code != CODE_PADDING).to(tl.int32), 1)
        tl.store(valid_ptr + token, count, mask=in_step)

    row_offset = tl.where(is_resident, offset, slot % BLOCK_SIZE)
    for i in tl.static_range(NS):
        stack = tl.load(stacks_ptr + i)
        block = tl.load(
            frame_blocks_ptr + frame * (1 + G) + 1 + stack, mask=is_resident, other=0
        )
        hot_block = tl.load(
            hot_blocks_ptr + (mixed64 * G + stack) * HB + slot // BLOCK_SIZE,
            mask=is_hot,
            other=0,
        )
        row = (block + hot_block) * block_stride_rows + row_offset
        row = tl.where(is_resident | is_hot, row, -1)
        entry = (token * rows_stride)[:, None] + k[None, :]
        tl.store(rows_ptr + i * rows_stack_stride + entry, row, mask=lane)


def lookup(
    positions: torch.Tensor,
    token_request: torch.Tensor,
    state_row: torch.Tensor,
    residency: Residency,
    unit: HotUnit,
    hot: HotBlocks,
    stacks: torch.Tensor,
    rows: torch.Tensor,
    code: torch.Tensor,
    used: torch.Tensor,
    faults: torch.Tensor,
    *,
    block_size: int,
    block_stride_rows: int,
    valid: torch.Tensor | None = None,
    tile: int | None = None,
    tokens: int | None = None,
) -> None:
    """Resolve top-k positions; leave the misses of mixed requests to `assign`.

    Resident rows are read in place, even where a hot copy exists (it just ages).
    Everything is written for each token; nothing is touched for padded ones.

    Args:
        positions: int32 ``[T, K]``. Positions of the token's request, distinct within
            a row; negative entries are padding.
        token_request: int32 ``[T]``. Batch row; values outside 0..B-1 are padding.
        state_row: int32 ``[B]``. State row, -1 for a padded request.
        residency: Page tables.
        unit: LRU of the index unit; read only.
        hot: Leased blocks; read only.
        stacks: int32 ``[NS]`` on the device. Stacks of the unit's layers.
        rows: int32 ``[NS, T, K]``, out. Physical row
            ``block * block_stride_rows + offset``; -1 for padding and misses.
        code: int32 ``[T, K]``, out. Logical plan, see `tensors.py`.
        used: int8 ``[B, H]``, dense, all zero before. Hot slots in use become 1.
        faults: int32 ``[NUM_FAULTS]``. Cell FAULT_NO_FRAME becomes 1 if a position
            lies outside the tables, or is not on the device while its request has no
            hot lease; such an entry resolves to padding.
        block_size: Tokens of a page, a power of two.
        block_stride_rows: Rows from one block of a layer's view to the next: block
            bytes / row bytes for flat rows, ``block_size`` for slots.
        valid: int32 ``[T]``, out. Entries that are not padding; misses count, because
            `assign` fills them. None: not wanted.
        tile: Entries per program, a power of two. With ``valid`` one program has the
            whole row, so that no atomic is needed.
        tokens: Tokens per program, a power of two.

    Raises:
        ValueError: With checks enabled: a shape or dtype differs.
    """
    num_tokens, top_k = positions.shape
    hot_rows = unit.slot_pos.shape[1]
    if valid is not None:
        tile = triton.next_power_of_2(top_k)
    tile = entry_tile(positions.device, top_k, tile)
    tokens = token_tile(positions.device, num_tokens, tile, tokens)
    if checks.ENABLED:
        _check_lookup(
            positions, token_request, state_row, residency, unit, hot, stacks, rows,
            code, used, faults, valid,
        )  # fmt: skip
    if num_tokens == 0:
        return
    _lookup_kernel[(triton.cdiv(num_tokens, tokens), triton.cdiv(top_k, tile))](
        positions,
        token_request,
        state_row,
        residency.page_frame,
        residency.frame_blocks,
        residency.mixed_row,
        unit.pos_slot,
        hot.hot_blocks,
        stacks,
        rows,
        code,
        used,
        valid,
        faults,
        num_tokens,
        state_row.shape[0],
        residency.page_frame.shape[1],
        unit.pos_slot.shape[1],
        positions.stride(0),
        code.stride(0),
        rows.stride(0),
        rows.stride(1),
        block_stride_rows,
        K=top_k,
        H=hot_rows,
        HB=hot.hot_blocks.shape[2],
        G=hot.hot_blocks.shape[1],
        NS=stacks.shape[0],
        BLOCK_SIZE=block_size,
        TILE=tile,
        TOKENS=tokens,
        COUNT_VALID=valid is not None,
        num_warps=row_warps(tile),
    )


def _check_lookup(
    positions, token_request, state_row, residency, unit, hot, stacks, rows, code,
    used, faults, valid,
) -> None:  # fmt: skip
    num_tokens, top_k = positions.shape
    num_mixed, hot_rows = unit.slot_pos.shape
    width = residency.frame_blocks.shape[1]
    num_states = residency.page_frame.shape[0]
    i16, i32 = torch.int16, torch.int32
    checks.expect("positions", positions, i32, None, None)
    checks.expect("token_request", token_request, i32, num_tokens)
    checks.expect("state_row", state_row, i32, None)
    checks.expect("page_frame", residency.page_frame, i32, None, None)
    checks.expect("frame_blocks", residency.frame_blocks, i32, None, width)
    checks.expect("mixed_row", residency.mixed_row, i32, num_states)
    checks.expect("pos_slot", unit.pos_slot, i16, num_mixed, None)
    checks.expect("hot_blocks", hot.hot_blocks, i32, num_mixed, width - 1, None)
    checks.expect("stacks", stacks, i32, None)
    checks.expect("rows", rows, i32, stacks.shape[0], num_tokens, top_k)
    checks.expect("code", code, i32, num_tokens, top_k)
    checks.expect("used", used, torch.int8, None, hot_rows)
    checks.expect("faults", faults, i32, None)
    if used.shape[0] < state_row.shape[0]:
        raise ValueError(f"used has {used.shape[0]} rows for {state_row.shape[0]}")
    if valid is not None:
        checks.expect("valid", valid, i32, num_tokens)
    if positions.device.type == "cpu":
        # Padded tokens may carry anything (D21 asks it of real rows).
        in_batch = (token_request >= 0) & (token_request < state_row.shape[0])
        owner = state_row[token_request.clamp(0, state_row.shape[0] - 1).long()]
        checks.expect_distinct("positions", positions[in_batch & (owner >= 0)])
    for name, tensor in (
        ("page_frame", residency.page_frame),
        ("frame_blocks", residency.frame_blocks),
        ("pos_slot", unit.pos_slot),
        ("hot_blocks", hot.hot_blocks),
        ("used", used),
    ):
        checks.expect_dense(name, tensor)


def lookup_reference(
    positions: torch.Tensor,
    token_request: torch.Tensor,
    state_row: torch.Tensor,
    residency: Residency,
    unit: HotUnit,
    hot: HotBlocks,
    stacks: torch.Tensor,
    rows: torch.Tensor,
    code: torch.Tensor,
    used: torch.Tensor,
    faults: torch.Tensor,
    *,
    block_size: int,
    block_stride_rows: int,
    valid: torch.Tensor | None = None,
) -> None:
    """`lookup` in torch, with the same arguments and effects."""
    num_pages = residency.page_frame.shape[1]
    max_positions = unit.pos_slot.shape[1]
    for token, request in enumerate(token_request.tolist()):
        pos = positions[token].long()
        out = torch.full_like(positions[token], CODE_PADDING.value)
        state = int(state_row[request]) if 0 <= request < len(state_row) else -1
        if state >= 0:
            mixed = int(residency.mixed_row[state])
            valid_pos = (pos >= 0) & (pos < num_pages * block_size)
            page = (pos // block_size).clamp(0, num_pages - 1)
            frame = residency.page_frame[state, page]
            frame = frame.masked_fill(~valid_pos, NO_FRAME)
            resident = frame >= 0
            out[resident] = (frame * block_size + pos % block_size)[resident].int()
            if mixed >= 0:
                absent = valid_pos & ~resident & (pos < max_positions)
                slot = unit.pos_slot[mixed, pos.clamp(0, max_positions - 1)].int()
                out[absent] = CODE_MISS.value
                is_hot = absent & (slot >= 0)
                out[is_hot] = CODE_HOT.value - slot[is_hot]
                used[request, slot[is_hot].long()] = 1
            if bool(((pos >= 0) & (out == CODE_PADDING.value)).any()):
                faults[FAULT_NO_FRAME.value] = 1
        code[token] = out
    if valid is not None:
        valid.copy_((code != CODE_PADDING.value).sum(1))
    translate_reference(
        code, token_request, state_row, residency, hot, stacks, rows,
        hot_rows=unit.slot_pos.shape[1], block_size=block_size,
        block_stride_rows=block_stride_rows,
    )  # fmt: skip
