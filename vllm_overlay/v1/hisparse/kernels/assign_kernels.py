# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Device code of `assign`; its launcher and reference are in `assign.py`.

The barriers order global memory within a program: Triton itself orders shared memory
only. Any two operations on the same address, one of them a store, need one between
them, also where each thread seems to touch its own elements (the layouts may differ).
"""

import triton
import triton.language as tl

from .tensors import (
    CODE_HOT,
    CODE_MISS,
    CODE_PADDING,
    FAULT_OVERFLOW,
    FAULT_QUERY_ROWS,
)

# A miss of query row r, entry k, claims its position by CLAIM - (r * K + k) in
# pos_slot: below every slot and NO_SLOT, down to -32767.
_CLAIM = tl.constexpr(-2)
# Code of a miss that another query row claimed: _SHARED - (index of that miss). Below
# every hot index; lives inside the kernel only.
_SHARED = tl.constexpr(-(1 << 20))


@triton.jit
def _claim_misses(
    positions_ptr,
    code_ptr,
    map_ptr,
    misses_ptr,
    start,
    num_rows,
    positions_stride,
    code_stride,
    K: tl.constexpr,
    KP: tl.constexpr,
):
    """Dedup the misses; list the winners' indices r * K + k in order.

    Returns the number of distinct misses and of the others.
    """
    k = tl.arange(0, KP)
    lane = k < K
    if num_rows > 1:
        # Descending, so that the lowest row that misses a position writes last.
        for i in range(0, num_rows):
            row = num_rows - 1 - i
            token = (start + row).to(tl.int64)
            code = tl.load(code_ptr + token * code_stride + k, mask=lane, other=-1)
            is_miss = code == CODE_MISS
            pos = tl.load(
                positions_ptr + token * positions_stride + k, mask=is_miss, other=0
            )
            claim = (-(row * K + k) + _CLAIM).to(tl.int16)
            tl.store(map_ptr + pos, claim, mask=is_miss)
            tl.debug_barrier()
    num_misses = 0
    num_shared = 0
    for row in range(0, num_rows):
        token = (start + row).to(tl.int64)
        code = tl.load(code_ptr + token * code_stride + k, mask=lane, other=-1)
        is_miss = code == CODE_MISS
        won = is_miss
        if num_rows > 1:
            pos = tl.load(
                positions_ptr + token * positions_stride + k, mask=is_miss, other=0
            )
            claim = tl.load(map_ptr + pos, mask=is_miss, other=0).to(tl.int32)
            winner = -claim + _CLAIM
            won = is_miss & (winner == row * K + k)
            tl.debug_barrier()
            tl.store(
                code_ptr + token * code_stride + k,
                -winner + _SHARED,
                mask=is_miss & (winner != row * K + k),
            )
        won32 = won.to(tl.int32)
        rank = num_misses + tl.cumsum(won32, 0) - 1
        tl.store(misses_ptr + rank, row * K + k, mask=won)
        row_wins = tl.sum(won32, 0)
        num_misses += row_wins
        num_shared += tl.sum(is_miss.to(tl.int32), 0) - row_wins
    return num_misses, num_shared


@triton.jit
def _partition_lru(
    used_ptr,
    order_ptr,
    slot_pos_ptr,
    map_ptr,
    taken_ptr,
    num_misses,
    H: tl.constexpr,
    HP: tl.constexpr,
):
    """Take the oldest slots not in use, write the new order, clear the marks.

    Returns the number of slots that were not in use.
    """
    h = tl.arange(0, HP)
    lane = h < H
    marks = tl.load(used_ptr + h, mask=lane, other=0).to(tl.int32)
    slot = tl.load(order_ptr + h, mask=lane, other=0).to(tl.int32)
    # Gathered in shared memory: the marks need no second, scattered load.
    is_free = lane & (tl.gather(marks, slot, 0) == 0)
    tl.debug_barrier()
    tl.store(used_ptr + h, tl.zeros([HP], tl.int8), mask=lane)
    free32 = is_free.to(tl.int32)
    rank = tl.cumsum(free32, 0) - free32
    num_free = tl.sum(free32, 0)
    num_taken = tl.minimum(num_misses, num_free)
    is_taken = is_free & (rank < num_misses)
    old = tl.load(slot_pos_ptr + slot, mask=is_taken, other=-1)
    tl.store(map_ptr + old, tl.full([HP], -1, tl.int16), mask=is_taken & (old >= 0))
    tl.store(taken_ptr + rank, slot, mask=is_taken)
    place = tl.where(is_free, rank - num_taken, num_free + (h - rank))
    place = tl.where(is_taken, num_free - num_taken + rank, place)
    tl.store(order_ptr + place, slot.to(tl.int16), mask=lane)
    return num_free


@triton.jit
def _partition_large_lru(
    used_ptr,
    order_ptr,
    slot_pos_ptr,
    map_ptr,
    taken_ptr,
    new_order_ptr,
    num_misses,
    H: tl.constexpr,
    TILE: tl.constexpr,
):
    """`_partition_lru` in tiles, for more hot rows than registers can hold.

    The new order goes through scratch: places in later tiles are still to be read.
    """
    num_free = 0
    for first in range(0, H, TILE):
        h = first + tl.arange(0, TILE)
        marks = tl.load(used_ptr + h, mask=h < H, other=1)
        num_free += tl.sum((marks == 0).to(tl.int32), 0)
    num_taken = tl.minimum(num_misses, num_free)
    free_before = 0
    for first in range(0, H, TILE):
        h = first + tl.arange(0, TILE)
        lane = h < H
        slot = tl.load(order_ptr + h, mask=lane, other=0).to(tl.int32)
        is_free = tl.load(used_ptr + slot, mask=lane, other=1) == 0
        free32 = is_free.to(tl.int32)
        rank = free_before + tl.cumsum(free32, 0) - free32
        free_before += tl.sum(free32, 0)
        is_taken = is_free & (rank < num_misses)
        old = tl.load(slot_pos_ptr + slot, mask=is_taken, other=-1)
        absent = tl.full([TILE], -1, tl.int16)
        tl.store(map_ptr + old, absent, mask=is_taken & (old >= 0))
        tl.store(taken_ptr + rank, slot, mask=is_taken)
        place = tl.where(is_free, rank - num_taken, num_free + (h - rank))
        place = tl.where(is_taken, num_free - num_taken + rank, place)
        tl.store(new_order_ptr + place, slot, mask=lane)
    tl.debug_barrier()
    for first in range(0, H, TILE):
        h = first + tl.arange(0, TILE)
        slot = tl.load(new_order_ptr + h, mask=h < H, other=0)
        tl.store(order_ptr + h, slot.to(tl.int16), mask=h < H)
        tl.store(used_ptr + h, tl.zeros([TILE], tl.int8), mask=h < H)
    return num_free


@triton.jit
def _fill_misses(
    positions_ptr,
    host_table_ptr,
    code_ptr,
    rows_ptr,
    map_ptr,
    slot_pos_ptr,
    hot_blocks_ptr,
    overflow_ptr,
    stacks_ptr,
    misses_ptr,
    taken_ptr,
    plan_src_ptr,
    plan_slot_ptr,
    start,
    num_misses,
    num_free,
    positions_stride,
    code_stride,
    rows_stack_stride,
    rows_stride,
    block_stride_rows,
    K: tl.constexpr,
    H: tl.constexpr,
    HB: tl.constexpr,
    OB: tl.constexpr,
    NS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Give each listed miss its slot or overflow row; write maps, plan and rows."""
    for first in range(0, num_misses, TILE):
        i = first + tl.arange(0, TILE)
        is_hot = (i < num_misses) & (i < num_free)
        over = i - num_free
        is_over = (i < num_misses) & (over >= 0) & (over < OB * BLOCK_SIZE)
        has_row = is_hot | is_over
        index = tl.load(misses_ptr + i, mask=i < num_misses, other=0)
        row = index // K
        k = index - row * K
        token = (start + row).to(tl.int64)
        pos = tl.load(
            positions_ptr + token * positions_stride + k, mask=i < num_misses, other=0
        )
        slot = tl.load(taken_ptr + i, mask=is_hot, other=0)
        page = pos // BLOCK_SIZE
        host_page = tl.load(host_table_ptr + page, mask=has_row, other=0)
        hot_index = tl.where(is_hot, slot, H + over)
        host_row = host_page * BLOCK_SIZE + (pos - page * BLOCK_SIZE)
        tl.store(plan_src_ptr + i, host_row, mask=has_row)
        tl.store(plan_slot_ptr + i, hot_index, mask=has_row)
        # An overflow row is not remembered, but its claim must go.
        remembered = tl.where(is_hot, slot, -1).to(tl.int16)
        tl.store(map_ptr + pos, remembered, mask=i < num_misses)
        tl.store(slot_pos_ptr + slot, pos, mask=is_hot)
        code = tl.where(has_row, -hot_index + CODE_HOT, CODE_PADDING)
        tl.store(code_ptr + token * code_stride + k, code, mask=i < num_misses)
        over_block = tl.load(overflow_ptr + over // BLOCK_SIZE, mask=is_over, other=0)
        offset = tl.where(is_hot, slot, over) % BLOCK_SIZE
        for n in tl.static_range(NS):
            stack = tl.load(stacks_ptr + n)
            block = tl.load(
                hot_blocks_ptr + stack * HB + slot // BLOCK_SIZE, mask=is_hot, other=0
            )
            physical = (block + over_block) * block_stride_rows + offset
            physical = tl.where(has_row, physical, -1)
            out = rows_ptr + n * rows_stack_stride + token * rows_stride + k
            tl.store(out, physical, mask=i < num_misses)


@triton.jit
def _copy_shared(
    code_ptr,
    rows_ptr,
    start,
    num_rows,
    code_stride,
    rows_stack_stride,
    rows_stride,
    K: tl.constexpr,
    KP: tl.constexpr,
    NS: tl.constexpr,
):
    """Give the misses that another row claimed the code and rows of that miss."""
    k = tl.arange(0, KP)
    for row in range(0, num_rows):
        token = (start + row).to(tl.int64)
        own = code_ptr + token * code_stride + k
        code = tl.load(own, mask=k < K, other=-1)
        is_shared = code <= _SHARED
        winner = -code + _SHARED
        winner_row = winner // K
        winner_k = winner - winner_row * K
        source = (start + winner_row).to(tl.int64)
        code = tl.load(
            code_ptr + source * code_stride + winner_k, mask=is_shared, other=-1
        )
        tl.debug_barrier()
        tl.store(own, code, mask=is_shared)
        for n in tl.static_range(NS):
            rows = rows_ptr + n * rows_stack_stride
            physical = tl.load(
                rows + source * rows_stride + winner_k, mask=is_shared, other=-1
            )
            tl.store(rows + token * rows_stride + k, physical, mask=is_shared)


@triton.jit(
    # These may begin anywhere in a longer tensor.
    do_not_specialize_on_alignment=["state_row_ptr", "query_start_ptr"]
)
def assign_kernel(
    positions_ptr,
    query_start_ptr,
    state_row_ptr,
    mixed_row_ptr,
    host_table_ptr,
    slot_pos_ptr,
    order_ptr,
    pos_slot_ptr,
    hot_blocks_ptr,
    overflow_blocks_ptr,
    stacks_ptr,
    rows_ptr,
    code_ptr,
    used_ptr,
    scratch_ptr,
    plan_src_ptr,
    plan_slot_ptr,
    plan_count_ptr,
    plan_hot_count_ptr,
    counters_ptr,
    faults_ptr,
    max_positions,
    positions_stride,
    code_stride,
    rows_stack_stride,
    rows_stride,
    host_table_stride,
    scratch_stride,
    plan_stride,
    block_stride_rows,
    MAX_ROWS: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    H: tl.constexpr,
    HP: tl.constexpr,
    LRU_TILE: tl.constexpr,
    HB: tl.constexpr,
    OB: tl.constexpr,
    G: tl.constexpr,
    NS: tl.constexpr,
    NUM_COUNTERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    state = tl.load(state_row_ptr + request)
    mixed = tl.load(mixed_row_ptr + state, mask=state >= 0, other=-1).to(tl.int64)
    if mixed < 0:
        tl.store(plan_count_ptr + request, 0)
        tl.store(plan_hot_count_ptr + request, 0)
        return
    state64 = state.to(tl.int64)
    start = tl.load(query_start_ptr + request)
    wanted_rows = tl.load(query_start_ptr + request + 1) - start
    num_rows = tl.minimum(wanted_rows, MAX_ROWS)
    cell = tl.arange(0, 8)
    counters_ptr += request * NUM_COUNTERS + cell
    counters = tl.load(counters_ptr, mask=cell < NUM_COUNTERS, other=0)
    map_ptr = pos_slot_ptr + mixed * max_positions
    slot_pos_ptr += mixed * H
    taken_ptr = scratch_ptr + request * scratch_stride
    misses_ptr = taken_ptr + H

    num_misses, num_shared = _claim_misses(
        positions_ptr, code_ptr, map_ptr, misses_ptr, start, num_rows,
        positions_stride, code_stride, K, KP,
    )  # fmt: skip
    if HP <= LRU_TILE:
        num_free = _partition_lru(
            used_ptr + request * H, order_ptr + mixed * H, slot_pos_ptr, map_ptr,
            taken_ptr, num_misses, H, HP,
        )  # fmt: skip
    else:
        num_free = _partition_large_lru(
            used_ptr + request * H, order_ptr + mixed * H, slot_pos_ptr, map_ptr,
            taken_ptr, misses_ptr + MAX_ROWS * K, num_misses, H, LRU_TILE,
        )  # fmt: skip
    tl.debug_barrier()
    _fill_misses(
        positions_ptr, host_table_ptr + state64 * host_table_stride, code_ptr,
        rows_ptr, map_ptr, slot_pos_ptr, hot_blocks_ptr + mixed * G * HB,
        overflow_blocks_ptr + mixed * OB, stacks_ptr, misses_ptr, taken_ptr,
        plan_src_ptr + request * plan_stride, plan_slot_ptr + request * plan_stride,
        start, num_misses, num_free, positions_stride, code_stride,
        rows_stack_stride, rows_stride, block_stride_rows,
        K, H, HB, OB, NS, BLOCK_SIZE, TILE,
    )  # fmt: skip
    if num_shared > 0:
        tl.debug_barrier()
        _copy_shared(
            code_ptr, rows_ptr, start, num_rows, code_stride, rows_stack_stride,
            rows_stride, K, KP, NS,
        )  # fmt: skip

    num_hot = tl.minimum(num_misses, num_free)
    num_planned = tl.minimum(num_misses, num_free + OB * BLOCK_SIZE)
    tl.store(plan_count_ptr + request, num_planned)
    tl.store(plan_hot_count_ptr + request, num_hot)
    added = tl.where(cell == 0, H - num_free, 0)
    added = tl.where(cell == 1, num_misses, added)
    added = tl.where(cell == 2, num_misses - num_hot, added)
    added = tl.where(cell == 3, num_shared, added)
    added = tl.where(cell == 4, 1, added)
    tl.store(counters_ptr, counters + added, mask=cell < NUM_COUNTERS)
    tl.store(faults_ptr + FAULT_OVERFLOW, 1, mask=num_planned < num_misses)
    tl.store(faults_ptr + FAULT_QUERY_ROWS, 1, mask=wanted_rows > MAX_ROWS)
