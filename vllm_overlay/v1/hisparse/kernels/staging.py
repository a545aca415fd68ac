# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Prefill over host-only pages: stage the pages that a chunk's top-k touches (D26).

The order is `mark_pages` (in one or several launches), `list_pages`, once for the unit
`staged_rows`, and then for each of its layers `copy_pages` (`staged_rows.py`).

A request's pages are staged in the blocks of its own hot lease, all of them, hot and
overflow: page number i in the i-th of them. They hold one layer at a time, so every
layer uses the same ones. Its hot rows are lost by that; the LRU must be reset.
"""

import torch
import triton
import triton.language as tl

from . import checks
from .owner import owner_of
from .shapes import token_tile
from .tensors import Residency


@triton.jit(
    do_not_specialize=["num_tokens", "num_requests"],
    # It may begin anywhere in a longer tensor.
    do_not_specialize_on_alignment=["state_row_ptr"],
)
def _mark_kernel(
    positions_ptr,
    token_request_ptr,
    state_row_ptr,
    page_count_ptr,
    page_frame_ptr,
    marks_ptr,
    num_tokens,
    num_requests,
    num_pages,
    positions_stride,
    K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
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
    valid = (pos >= 0) & (page < count[:, None])
    frames = page_frame_ptr + state.to(tl.int64)[:, None] * num_pages
    frame = tl.load(frames + page, mask=valid, other=0)
    # Programs may mark the same page: all of them write 1.
    mark = marks_ptr + request.to(tl.int64)[:, None] * num_pages + page
    tl.store(mark, tl.full([TOKENS, TILE], 1, tl.int8), mask=valid & (frame < 0))


def mark_pages(
    positions: torch.Tensor,
    token_request: torch.Tensor,
    state_row: torch.Tensor,
    page_count: torch.Tensor,
    residency: Residency,
    marks: torch.Tensor,
    *,
    block_size: int,
    tokens: int | None = None,
) -> None:
    """Mark the host-only pages that top-k positions lie in.

    Args:
        positions: int32 ``[T, K]``. Positions of the token's request; negative entries
            are padding.
        token_request: int32 ``[T]``. Batch row; values outside 0..B-1 are padding.
        state_row: int32 ``[B]``. State row, -1 for a padded request.
        page_count: int32 ``[S]``. Pages of the request in each state row.
        residency: Page tables.
        marks: int8 ``[B, P]``, dense. Touched host-only pages become 1.
        block_size: Tokens of a page, a power of two.
        tokens: Tokens per program, a power of two.

    Raises:
        ValueError: With checks enabled: a shape or dtype differs.
    """
    num_tokens, top_k = positions.shape
    num_pages = residency.page_frame.shape[1]
    if checks.ENABLED:
        i32 = torch.int32
        checks.expect("positions", positions, i32, None, None)
        checks.expect("token_request", token_request, i32, num_tokens)
        checks.expect("page_count", page_count, i32, residency.page_frame.shape[0])
        checks.expect("marks", marks, torch.int8, None, num_pages)
        checks.expect_at_most("requests", state_row.shape[0], marks.shape[0])
        checks.expect_dense("marks", marks)
        checks.expect_dense("page_frame", residency.page_frame)
    if num_tokens == 0:
        return
    tile = triton.next_power_of_2(top_k)
    tokens = token_tile(positions.device, num_tokens, tile, tokens)
    _mark_kernel[(triton.cdiv(num_tokens, tokens),)](
        positions,
        token_request,
        state_row,
        page_count,
        residency.page_frame,
        marks,
        num_tokens,
        state_row.shape[0],
        num_pages,
        positions.stride(0),
        K=top_k,
        BLOCK_SIZE=block_size,
        TILE=tile,
        TOKENS=tokens,
        num_warps=4,
    )


def mark_pages_reference(
    positions: torch.Tensor,
    token_request: torch.Tensor,
    state_row: torch.Tensor,
    page_count: torch.Tensor,
    residency: Residency,
    marks: torch.Tensor,
    *,
    block_size: int,
) -> None:
    """`mark_pages` in torch, with the same arguments and effects."""
    for token, request in enumerate(token_request.tolist()):
        state = int(state_row[request]) if 0 <= request < len(state_row) else -1
        if state >= 0:
            pos = positions[token]
            page = pos[pos >= 0] // block_size
            page = page[page < page_count[state]].long()
            marks[request, page[residency.page_frame[state, page] < 0]] = 1


@triton.jit(
    do_not_specialize=["capacity"], do_not_specialize_on_alignment=["state_row_ptr"]
)
def _list_kernel(
    state_row_ptr,
    page_count_ptr,
    host_table_ptr,
    marks_ptr,
    staging_index_ptr,
    staged_pages_ptr,
    staged_count_ptr,
    capacity,
    num_pages,
    host_table_stride,
    TILE: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    state = tl.load(state_row_ptr + request)
    count = tl.load(page_count_ptr + state, mask=state >= 0, other=0)
    row = request * num_pages
    table = host_table_ptr + state.to(tl.int64) * host_table_stride
    pages = staged_pages_ptr + request * capacity
    total = 0
    for first in range(0, count, TILE):
        page = first + tl.arange(0, TILE)
        lane = page < count
        mark = tl.load(marks_ptr + row + page, mask=lane, other=0).to(tl.int32)
        host_page = tl.load(table + page, mask=lane, other=0)
        index = total + tl.cumsum(mark, 0) - mark
        is_staged = (mark != 0) & (index < capacity)
        tl.store(pages + index, host_page, mask=is_staged)
        index = tl.where(is_staged, index, -1)
        tl.store(staging_index_ptr + row + page, index, mask=lane)
        tl.debug_barrier()
        tl.store(marks_ptr + row + page, tl.zeros([TILE], tl.int8), mask=lane)
        total += tl.sum(mark, 0)
    tl.store(staged_count_ptr + request, total)


def list_pages(
    state_row: torch.Tensor,
    page_count: torch.Tensor,
    host_table: torch.Tensor,
    marks: torch.Tensor,
    staging_index: torch.Tensor,
    staged_pages: torch.Tensor,
    staged_count: torch.Tensor,
    *,
    tile: int | None = None,
) -> None:
    """Number the marked pages of each request, in their order.

    A host page that two requests share is staged for each of them.

    Args:
        state_row: int32 ``[B]``. State row, -1 for a padded request.
        page_count: int32 ``[S]``. Pages of the request in each state row.
        host_table: int32 ``[S, P]``. Host page of each page, by state row.
        marks: int8 ``[B, P]``, dense, from `mark_pages`; zero again afterwards.
        staging_index: int32 ``[B, P]``, dense, out. Number of a marked page; -1 for
            the others and for those beyond the capacity. Entries beyond a request's
            pages, and rows of padded requests, keep what they had.
        staged_pages: int32 ``[B, C]``, dense, out. Host page of each number; C is the
            capacity, blocks of a lease.
        staged_count: int32 ``[B]``, out. Marked pages. Above C, the pages beyond are
            not staged and the chunk must be split.
        tile: Pages looked at together, a power of two.

    Raises:
        ValueError: With checks enabled: a shape or dtype differs.
    """
    num_requests, num_pages = state_row.shape[0], marks.shape[1]
    if checks.ENABLED:
        i32 = torch.int32
        checks.expect("state_row", state_row, i32, None)
        checks.expect("page_count", page_count, i32, None)
        checks.expect("host_table", host_table, i32, None, None)
        checks.expect("marks", marks, torch.int8, None, num_pages)
        checks.expect("staging_index", staging_index, i32, None, num_pages)
        checks.expect("staged_pages", staged_pages, i32, num_requests, None)
        checks.expect("staged_count", staged_count, i32, num_requests)
        checks.expect_dense("marks", marks)
        checks.expect_dense("staging_index", staging_index)
        checks.expect_dense("staged_pages", staged_pages)
    if num_requests == 0:
        return
    _list_kernel[(num_requests,)](
        state_row,
        page_count,
        host_table,
        marks,
        staging_index,
        staged_pages,
        staged_count,
        staged_pages.shape[1],
        num_pages,
        host_table.stride(0),
        # 4,096: 93 registers; 16,384 in one tile spills (compiled for sm_90).
        TILE=tile or min(4096, triton.next_power_of_2(num_pages)),
        num_warps=16,
    )


def list_pages_reference(
    state_row: torch.Tensor,
    page_count: torch.Tensor,
    host_table: torch.Tensor,
    marks: torch.Tensor,
    staging_index: torch.Tensor,
    staged_pages: torch.Tensor,
    staged_count: torch.Tensor,
) -> None:
    """`list_pages` in torch, with the same arguments and effects."""
    for request, state in enumerate(state_row.tolist()):
        total = 0
        for page in range(int(page_count[state]) if state >= 0 else 0):
            staging_index[request, page] = -1
            if marks[request, page]:
                if total < staged_pages.shape[1]:
                    staging_index[request, page] = total
                    staged_pages[request, total] = host_table[state, page]
                total += 1
                marks[request, page] = 0
        staged_count[request] = total
