# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Where the step's tokens are written, and the indexer's block table (D16, D18)."""

import torch
import triton
import triton.language as tl

from . import checks
from .tensors import INDEXER_ONLY, Residency


@triton.jit
def _slots_kernel(
    positions_ptr,
    query_start_ptr,
    state_row_ptr,
    page_frame_ptr,
    frame_blocks_ptr,
    slots_ptr,
    token_request_ptr,
    num_slots,
    num_pages,
    slots_stride,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0)
    is_padding = request == tl.num_programs(0) - 1
    # The last program has the tokens behind the batch; they belong to no request.
    start = tl.load(query_start_ptr + request)
    end = tl.load(query_start_ptr + request + 1, mask=is_padding == 0, other=0)
    end = tl.where(is_padding, num_slots, end)
    state = tl.load(state_row_ptr + request, mask=is_padding == 0, other=-1)
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        lane = token < end
        live = lane & (state >= 0)
        if tl.program_id(1) == 0:
            owner = tl.where(live, request, -1)
            tl.store(token_request_ptr + token, owner, mask=lane)
        pos = tl.load(positions_ptr + token, mask=live, other=-1).to(tl.int32)
        page = pos // BLOCK_SIZE
        offset = pos - page * BLOCK_SIZE
        frame = tl.load(
            page_frame_ptr + state.to(tl.int64) * num_pages + page,
            mask=live & (pos >= 0) & (page < num_pages),
            other=-1,
        )
        for i in tl.static_range(GROUPS):
            group = tl.program_id(1) * GROUPS + i
            block = tl.load(
                frame_blocks_ptr + frame * WIDTH + group, mask=frame >= 0, other=0
            )
            slot = block.to(tl.int64) * BLOCK_SIZE + offset
            out = slots_ptr + tl.cast(group, tl.int64) * slots_stride + token
            tl.store(out, tl.where(frame >= 0, slot, -1), mask=lane)


def slot_mappings(
    positions: torch.Tensor,
    query_start: torch.Tensor,
    state_row: torch.Tensor,
    residency: Residency,
    slots: torch.Tensor,
    token_request: torch.Tensor,
    *,
    block_size: int,
    tile: int = 1024,
    groups_per_program: int | None = None,
) -> None:
    """Slots in which the step's tokens store their rows.

    Args:
        positions: int32 or int64 ``[>= T]``. Position of each token in its request.
        query_start: int32 ``[B + 1]``. First token of each request; the last entry is
            the number of tokens without padding.
        state_row: int32 ``[B]``. State row, -1 for a padded request.
        residency: Page tables. Pages that are written have a frame (R3).
        slots: int64 ``[1 + G, N]``, out, N >= T. Row 0 the indexer, row 1 + g stack g:
            block * block_size + offset; -1 for padding, for tokens behind the batch
            and for pages without a frame.
        token_request: int32 ``[N]``, out. Batch row of each token; -1 for padding and
            for tokens behind the batch.
        block_size: Tokens of a page, a power of two.
        tile: Tokens a program looks at together, a power of two.
        groups_per_program: Rows of ``slots`` per program, a divisor of 1 + G.

    Raises:
        ValueError: With checks enabled: a shape or dtype differs.
    """
    num_requests = state_row.shape[0]
    width = residency.frame_blocks.shape[1]
    if checks.ENABLED:
        i32, i64 = torch.int32, torch.int64
        checks.expect("positions", positions, (i32, i64), None)
        checks.expect("query_start", query_start, i32, num_requests + 1)
        checks.expect("state_row", state_row, i32, None)
        checks.expect("slots", slots, i64, width, None)
        checks.expect("token_request", token_request, i32, slots.shape[1])
    groups = groups_per_program or (width if slots.device.type == "cpu" else 1)
    _slots_kernel[(num_requests + 1, width // groups)](
        positions,
        query_start,
        state_row,
        residency.page_frame,
        residency.frame_blocks,
        slots,
        token_request,
        slots.shape[1],
        residency.page_frame.shape[1],
        slots.stride(0),
        WIDTH=width,
        GROUPS=groups,
        BLOCK_SIZE=block_size,
        TILE=tile,
        num_warps=4,
    )


def slot_mappings_reference(
    positions: torch.Tensor,
    query_start: torch.Tensor,
    state_row: torch.Tensor,
    residency: Residency,
    slots: torch.Tensor,
    token_request: torch.Tensor,
    *,
    block_size: int,
) -> None:
    """`slot_mappings` in torch, with the same arguments and effects."""
    slots[:, int(query_start[0]) :] = -1
    token_request[int(query_start[0]) :] = -1
    starts = query_start.tolist()
    for request, state in enumerate(state_row.tolist()):
        for token in range(starts[request], starts[request + 1]):
            page, offset = divmod(int(positions[token]), block_size)
            token_request[token] = request if state >= 0 else -1
            in_table = state >= 0 and 0 <= page < residency.page_frame.shape[1]
            frame = int(residency.page_frame[state, page]) if in_table else -1
            if frame >= 0:
                blocks = residency.frame_blocks[frame].long()
                slots[:, token] = blocks * block_size + offset


@triton.jit
def _indexer_table_kernel(
    state_row_ptr,
    page_count_ptr,
    page_frame_ptr,
    frame_blocks_ptr,
    table_ptr,
    num_pages,
    table_width,
    table_stride,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    state = tl.load(state_row_ptr + request)
    # A padded row becomes null blocks to its end, so that no kernel follows a stale
    # entry of an earlier batch.
    count = tl.load(page_count_ptr + state, mask=state >= 0, other=table_width)
    count = tl.minimum(count, table_width)
    step = tl.num_programs(1) * TILE
    for first in range(tl.program_id(1) * TILE, count, step):
        page = first + tl.arange(0, TILE)
        lane = page < count
        entry = tl.load(
            page_frame_ptr + state.to(tl.int64) * num_pages + page,
            mask=lane & (state >= 0),
            other=-1,
        )
        frame = tl.where(entry >= 0, entry, -entry + INDEXER_ONLY)
        block = tl.load(
            frame_blocks_ptr + frame * WIDTH, mask=lane & (frame >= 0), other=0
        )
        tl.store(table_ptr + request * table_stride + page, block, mask=lane)


def gather_indexer_table(
    state_row: torch.Tensor,
    page_count: torch.Tensor,
    residency: Residency,
    table: torch.Tensor,
    *,
    programs_per_request: int | None = None,
    tile: int | None = None,
) -> None:
    """Block table of the indexer for the batch.

    Args:
        state_row: int32 ``[B]``. State row, -1 for a padded request.
        page_count: int32 ``[S]``. Pages of the request in each state row.
        residency: Page tables.
        table: int32 ``[>= B, <= P]``, out. Indexer block of each page, the null block
            0 for a page without one. Entries behind a request's pages keep what they
            had; the row of a padded request becomes 0.
        programs_per_request: Programs that share a request's pages.
        tile: Pages a program looks at together, a power of two.

    Raises:
        ValueError: With checks enabled: a shape or dtype differs.
    """
    num_requests = state_row.shape[0]
    num_states, num_pages = residency.page_frame.shape
    if checks.ENABLED:
        i32 = torch.int32
        checks.expect("state_row", state_row, i32, None)
        checks.expect("page_count", page_count, i32, num_states)
        checks.expect("table", table, i32, None, None)
        checks.expect_at_most("requests", num_requests, table.shape[0])
        checks.expect_at_most("table width", table.shape[1], num_pages)
    if num_requests == 0:
        return
    on_cpu = table.device.type == "cpu"
    if tile is None:
        tile = triton.next_power_of_2(table.shape[1])
        tile = tile if on_cpu else min(tile, 1024)
    programs = programs_per_request or (1 if on_cpu else 4)
    _indexer_table_kernel[(num_requests, programs)](
        state_row,
        page_count,
        residency.page_frame,
        residency.frame_blocks,
        table,
        num_pages,
        table.shape[1],
        table.stride(0),
        WIDTH=residency.frame_blocks.shape[1],
        TILE=tile,
        num_warps=4,
    )


def gather_indexer_table_reference(
    state_row: torch.Tensor,
    page_count: torch.Tensor,
    residency: Residency,
    table: torch.Tensor,
) -> None:
    """`gather_indexer_table` in torch, with the same arguments and effects."""
    for request, state in enumerate(state_row.tolist()):
        if state < 0:
            table[request] = 0
            continue
        for page in range(min(int(page_count[state]), table.shape[1])):
            entry = int(residency.page_frame[state, page])
            frame = entry if entry >= 0 else INDEXER_ONLY.value - entry
            block = residency.frame_blocks[frame, 0] if frame >= 0 else 0
            table[request, page] = block
