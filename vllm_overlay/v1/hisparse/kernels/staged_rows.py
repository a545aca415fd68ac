# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Rows and bytes of staged pages, per layer (D26); `staging.py` tells the order."""

import torch
import triton
import triton.language as tl

from . import checks
from .fetch import CHUNK_BYTES, launch_shape
from .owner import owner_of
from .shapes import row_warps, token_tile
from .tensors import FAULT_NO_FRAME, NO_ROW, HotBlocks, Residency


@triton.jit
def _lease_block(
    hot_blocks_ptr, overflow_blocks_ptr, mixed, number, mask,
    HOT: tl.constexpr, OB: tl.constexpr,
):  # fmt: skip
    """Block of this number in the leases of mixed rows; hot blocks come first."""
    mixed = mixed.to(tl.int64)
    over = number - HOT
    block = tl.load(
        hot_blocks_ptr + mixed * HOT + number, mask=mask & (over < 0), other=0
    )
    return block + tl.load(
        overflow_blocks_ptr + mixed * OB + over, mask=mask & (over >= 0), other=0
    )


@triton.jit(
    do_not_specialize=["num_tokens", "num_requests"],
    # These may begin anywhere in a longer tensor.
    do_not_specialize_on_alignment=["state_row_ptr", "valid_ptr"],
)
def _staged_rows_kernel(
    positions_ptr,
    token_request_ptr,
    state_row_ptr,
    page_count_ptr,
    page_frame_ptr,
    frame_blocks_ptr,
    mixed_row_ptr,
    staging_index_ptr,
    hot_blocks_ptr,
    overflow_blocks_ptr,
    stacks_ptr,
    rows_ptr,
    valid_ptr,
    faults_ptr,
    num_tokens,
    num_requests,
    num_pages,
    positions_stride,
    rows_stack_stride,
    rows_stride,
    block_stride_rows,
    K: tl.constexpr,
    HOT: tl.constexpr,
    OB: tl.constexpr,
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
    k = tl.arange(0, TILE)
    lane = in_step[:, None] & (k < K)[None, :]
    entry = (token * positions_stride)[:, None] + k[None, :]
    pos = tl.load(positions_ptr + entry, mask=lane, other=-1)
    request, state = owner_of(
        token_request_ptr, state_row_ptr, token, in_step, num_requests
    )
    count = tl.load(page_count_ptr + state, mask=state >= 0, other=0)
    page = pos // BLOCK_SIZE
    offset = pos - page * BLOCK_SIZE
    valid = (pos >= 0) & (page < count[:, None])
    frames = page_frame_ptr + state.to(tl.int64)[:, None] * num_pages
    frame = tl.load(frames + page, mask=valid, other=-1)
    is_resident = frame >= 0
    indices = staging_index_ptr + request.to(tl.int64)[:, None] * num_pages
    staged = tl.load(indices + page, mask=valid & (frame < 0), other=-1)
    mixed = tl.load(mixed_row_ptr + state, mask=state >= 0, other=-1)
    is_staged = (staged >= 0) & (mixed >= 0)[:, None]
    staging_block = _lease_block(
        hot_blocks_ptr, overflow_blocks_ptr, mixed[:, None], staged, is_staged, HOT, OB
    )
    has_row = is_resident | is_staged
    if COUNT_VALID:
        tl.store(valid_ptr + token, tl.sum(has_row.to(tl.int32), 1), mask=in_step)
    one = tl.full([TOKENS, TILE], 1, tl.int32)
    is_lost = (pos >= 0) & (state >= 0)[:, None] & (has_row == 0)
    tl.store(faults_ptr + FAULT_NO_FRAME + (one - 1), one, mask=is_lost)
    for i in tl.static_range(NS):
        stack = tl.load(stacks_ptr + i)
        block = tl.load(
            frame_blocks_ptr + frame * (1 + G) + 1 + stack, mask=is_resident, other=0
        )
        row = (block + staging_block) * block_stride_rows + offset
        row = tl.where(has_row, row, -1)
        entry = (token * rows_stride)[:, None] + k[None, :]
        tl.store(rows_ptr + i * rows_stack_stride + entry, row, mask=lane)


def staged_rows(
    positions: torch.Tensor,
    token_request: torch.Tensor,
    state_row: torch.Tensor,
    page_count: torch.Tensor,
    residency: Residency,
    hot: HotBlocks,
    staging_index: torch.Tensor,
    stacks: torch.Tensor,
    rows: torch.Tensor,
    faults: torch.Tensor,
    *,
    block_size: int,
    block_stride_rows: int,
    valid: torch.Tensor | None = None,
    tokens: int | None = None,
) -> None:
    """Physical rows of prefill tokens: resident pages in place, others staged.

    Args:
        positions: int32 ``[T, K]``, as given to `mark_pages`.
        token_request: int32 ``[T]``. Batch row; values outside 0..B-1 are padding.
        state_row: int32 ``[B]``. State row, -1 for a padded request.
        page_count: int32 ``[S]``. Pages of the request in each state row.
        residency: Page tables.
        hot: Leased blocks, in which the pages are staged.
        staging_index: int32 ``[B, P]``, dense, from `list_pages`.
        stacks: int32 ``[NS]`` on the device.
        rows: int32 ``[NS, T, K]``, out. Physical row; -1 for padding.
        faults: int32 ``[NUM_FAULTS]``. Cell FAULT_NO_FRAME becomes 1 if a position
            lies beyond the request's pages or its page is not staged (capacity); such
            an entry resolves to padding.
        block_size: Tokens of a page, a power of two.
        block_stride_rows: Rows from one block of a layer's view to the next.
        valid: int32 ``[T]``, out. Entries that are not padding. None: not wanted.
        tokens: Tokens per program, a power of two.

    Raises:
        ValueError: With checks enabled: a shape or dtype differs.
    """
    num_tokens, top_k = positions.shape
    num_pages = residency.page_frame.shape[1]
    if checks.ENABLED:
        i32, num_stacks = torch.int32, stacks.shape[0]
        checks.expect("positions", positions, i32, None, None)
        checks.expect("token_request", token_request, i32, num_tokens)
        checks.expect("staging_index", staging_index, i32, None, num_pages)
        checks.expect("rows", rows, i32, num_stacks, num_tokens, top_k)
        checks.expect("faults", faults, i32, None)
        checks.expect_dense("staging_index", staging_index)
        checks.expect_dense("hot_blocks", hot.hot_blocks)
    if num_tokens == 0:
        return
    tile = triton.next_power_of_2(top_k)
    tokens = token_tile(positions.device, num_tokens, tile, tokens)
    _staged_rows_kernel[(triton.cdiv(num_tokens, tokens),)](
        positions,
        token_request,
        state_row,
        page_count,
        residency.page_frame,
        residency.frame_blocks,
        residency.mixed_row,
        staging_index,
        hot.hot_blocks,
        hot.overflow_blocks,
        stacks,
        rows,
        valid,
        faults,
        num_tokens,
        state_row.shape[0],
        num_pages,
        positions.stride(0),
        rows.stride(0),
        rows.stride(1),
        block_stride_rows,
        K=top_k,
        HOT=hot.hot_blocks[0].numel(),
        OB=hot.overflow_blocks.shape[1],
        G=residency.frame_blocks.shape[1] - 1,
        NS=stacks.shape[0],
        BLOCK_SIZE=block_size,
        TILE=tile,
        TOKENS=tokens,
        COUNT_VALID=valid is not None,
        num_warps=row_warps(tile),
    )


def staged_rows_reference(
    positions: torch.Tensor,
    token_request: torch.Tensor,
    state_row: torch.Tensor,
    page_count: torch.Tensor,
    residency: Residency,
    hot: HotBlocks,
    staging_index: torch.Tensor,
    stacks: torch.Tensor,
    rows: torch.Tensor,
    faults: torch.Tensor,
    *,
    block_size: int,
    block_stride_rows: int,
    valid: torch.Tensor | None = None,
) -> None:
    """`staged_rows` in torch, with the same arguments and effects."""
    rows.fill_(NO_ROW)
    for token, request in enumerate(token_request.tolist()):
        state = int(state_row[request]) if 0 <= request < len(state_row) else -1
        for k, pos in enumerate(positions[token].tolist()):
            if pos < 0 or state < 0:
                continue
            page, offset = divmod(pos, block_size)
            frame = staged = -1
            if page < page_count[state]:
                frame = int(residency.page_frame[state, page])
                if frame < 0 <= residency.mixed_row[state]:
                    staged = int(staging_index[request, page])
            if frame < 0 and staged < 0:
                faults[FAULT_NO_FRAME.value] = 1
                continue
            for i, stack in enumerate(stacks.tolist()):
                if frame >= 0:
                    block = residency.frame_blocks[frame, 1 + stack]
                else:
                    block = _lease(hot, residency.mixed_row[state])[staged]
                rows[i, token, k] = block * block_stride_rows + offset
    if valid is not None:
        valid.copy_((rows[0] >= 0).sum(1))


def _lease(hot: HotBlocks, mixed: torch.Tensor) -> torch.Tensor:
    """All blocks of a mixed row's lease."""
    return torch.cat([hot.hot_blocks[mixed].flatten(), hot.overflow_blocks[mixed]])


@triton.jit(
    do_not_specialize=["capacity", "layer_chunk"],
    do_not_specialize_on_alignment=["state_row_ptr"],
)
def _copy_pages_kernel(
    staged_pages_ptr,
    staged_count_ptr,
    state_row_ptr,
    mixed_row_ptr,
    hot_blocks_ptr,
    overflow_blocks_ptr,
    host_ptr,
    slab_ptr,
    capacity,
    layer_chunk,
    HOT: tl.constexpr,
    OB: tl.constexpr,
    PAGE_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(1).to(tl.int64)
    state = tl.load(state_row_ptr + request)
    mixed = tl.load(mixed_row_ptr + state, mask=state >= 0, other=-1)
    count = tl.load(staged_count_ptr + request, mask=mixed >= 0, other=0)
    count = tl.minimum(count, capacity)
    word = tl.arange(0, 4)
    end = count.to(tl.int64) * PAGE_CHUNKS
    step = tl.num_programs(0) * TILE
    for first in range(tl.program_id(0).to(tl.int64) * TILE, end, step):
        chunk = first + tl.arange(0, TILE)
        lane = chunk < end
        number = (chunk // PAGE_CHUNKS).to(tl.int32)
        part = chunk - number.to(tl.int64) * PAGE_CHUNKS
        page = tl.load(
            staged_pages_ptr + request * capacity + number, mask=lane, other=0
        )
        block = _lease_block(
            hot_blocks_ptr, overflow_blocks_ptr, mixed, number, lane, HOT, OB
        )
        from_chunk = page.to(tl.int64) * PAGE_CHUNKS + part
        to_chunk = block.to(tl.int64) * BLOCK_CHUNKS + layer_chunk + part
        words = tl.load(
            host_ptr + (from_chunk * 4)[:, None] + word[None, :],
            mask=lane[:, None],
            other=0,
        )
        tl.store(
            slab_ptr + (to_chunk * 4)[:, None] + word[None, :],
            words,
            mask=lane[:, None],
        )


def copy_pages(
    staged_pages: torch.Tensor,
    staged_count: torch.Tensor,
    state_row: torch.Tensor,
    residency: Residency,
    hot: HotBlocks,
    host_pages: torch.Tensor,
    slab: torch.Tensor,
    *,
    layer_offset: int,
    programs: int | None = None,
    tile: int | None = None,
) -> None:
    """Copy one layer's staged pages from the host into the requests' leases.

    Args:
        staged_pages: int32 ``[B, C]``, dense, from `list_pages`.
        staged_count: int32 ``[B]`` from `list_pages`; at most C pages are copied.
        state_row: int32 ``[B]``, as given to `list_pages`.
        residency: Page tables; only ``mixed_row`` is read.
        hot: Leased blocks; C of them for each mixed row.
        host_pages: uint8 ``[host pages, page_bytes]``, dense, 16-byte aligned; pinned
            host memory where the slab is on a GPU.
        slab: uint8 ``[blocks, block_bytes]``, dense, 16-byte aligned; written.
        layer_offset: Byte of a block at which the layer's page begins.
        programs: Programs for each request.
        tile: 16-byte chunks a program copies at a time, a power of two.

    Raises:
        ValueError: With checks enabled: a shape, dtype or alignment does not hold.
    """
    page_bytes, block_bytes = host_pages.shape[1], slab.shape[1]
    if checks.ENABLED:
        lease_blocks = hot.hot_blocks[0].numel() + hot.overflow_blocks.shape[1]
        checks.expect("staged_pages", staged_pages, torch.int32, None, None)
        checks.expect("staged_count", staged_count, torch.int32, len(staged_pages))
        checks.expect("state_row", state_row, torch.int32, len(staged_pages))
        checks.expect_at_most("capacity", staged_pages.shape[1], lease_blocks)
        checks.expect_dense("staged_pages", staged_pages)
        checks.expect_dense("hot_blocks", hot.hot_blocks)
        checks.expect("host_pages", host_pages, torch.uint8, None, None)
        checks.expect("slab", slab, torch.uint8, None, None)
        checks.expect_dense("host_pages", host_pages)
        checks.expect_dense("slab", slab)
        checks.expect_at_most("end of the page", layer_offset + page_bytes, block_bytes)
        for value in (page_bytes, block_bytes, layer_offset):
            checks.expect_multiple("page, block and offset", value, CHUNK_BYTES)
    if len(staged_pages) == 0:
        return
    programs, tile = launch_shape(slab.device, programs, tile)
    _copy_pages_kernel[(programs, len(staged_pages))](
        staged_pages,
        staged_count,
        state_row,
        residency.mixed_row,
        hot.hot_blocks,
        hot.overflow_blocks,
        host_pages.view(torch.int32),
        slab.view(torch.int32),
        staged_pages.shape[1],
        layer_offset // CHUNK_BYTES,
        HOT=hot.hot_blocks[0].numel(),
        OB=hot.overflow_blocks.shape[1],
        PAGE_CHUNKS=page_bytes // CHUNK_BYTES,
        BLOCK_CHUNKS=block_bytes // CHUNK_BYTES,
        TILE=tile,
        num_warps=4,
    )


def copy_pages_reference(
    staged_pages: torch.Tensor,
    staged_count: torch.Tensor,
    state_row: torch.Tensor,
    residency: Residency,
    hot: HotBlocks,
    host_pages: torch.Tensor,
    slab: torch.Tensor,
    *,
    layer_offset: int,
) -> None:
    """`copy_pages` in torch, with the same arguments and effects."""
    for request, state in enumerate(state_row.tolist()):
        mixed = residency.mixed_row[state]
        if state >= 0 and mixed >= 0:
            count = min(int(staged_count[request]), staged_pages.shape[1])
            blocks = _lease(hot, mixed)[:count].long()
            source = host_pages[staged_pages[request, :count].long()]
            slab[blocks, layer_offset : layer_offset + host_pages.shape[1]] = source
