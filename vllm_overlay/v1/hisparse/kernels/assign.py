# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Hot slots for the misses of a step, by an exact LRU (D21-D23).

The LRU of a step, over all query rows of a request at once:

1. Slots that some row hit are in use. They are never taken in this step.
2. The distinct misses, ordered by query row and then by top-k entry, take the slots
   not in use, oldest first. Misses beyond these take overflow rows, which the LRU does
   not remember.
3. The new order, oldest first: slots neither in use nor taken, then taken slots in the
   order of their misses, then slots in use; the first and last group keep their old
   relative order.

Positions of one query row must be distinct.
"""

import torch
import triton

from . import checks
from .assign_kernels import assign_kernel
from .tensors import (
    CODE_HOT,
    CODE_MISS,
    CODE_PADDING,
    COUNTER_HITS,
    COUNTER_MISSES,
    COUNTER_OVERFLOW,
    COUNTER_SHARED,
    COUNTER_STEPS,
    FAULT_OVERFLOW,
    FAULT_QUERY_ROWS,
    MAX_CLAIMS,
    MAX_HOT_ROWS,
    NO_ROW,
    NUM_COUNTERS,
    FetchPlan,
    HotBlocks,
    HotUnit,
    Residency,
    scratch_width,
)


def assign(
    positions: torch.Tensor,
    query_start: torch.Tensor,
    state_row: torch.Tensor,
    residency: Residency,
    host_table: torch.Tensor,
    unit: HotUnit,
    hot: HotBlocks,
    stacks: torch.Tensor,
    rows: torch.Tensor,
    code: torch.Tensor,
    used: torch.Tensor,
    scratch: torch.Tensor,
    plan: FetchPlan,
    counters: torch.Tensor,
    faults: torch.Tensor,
    *,
    max_query_rows: int,
    block_size: int,
    block_stride_rows: int,
    tile: int | None = None,
    lru_tile: int | None = None,
) -> None:
    """Complete `lookup` for mixed requests: slots for misses, LRU, fetch plan.

    One program per request, and a pure function of its inputs. Requests that are
    padded or not mixed get an empty plan and nothing else. The module's docstring
    defines the LRU. The hot buffer's bytes are not there yet: `fetch_rows` brings them.

    Args:
        positions: int32 ``[T, K]``, as given to `lookup`.
        query_start: int32 ``[B + 1]``. First token of each request.
        state_row: int32 ``[B]``. State row, -1 for a padded request.
        residency: Page tables; only ``mixed_row`` is read.
        host_table: int32 ``[S, P]``. Host page of each page, by state row.
        unit: LRU of the index unit; updated.
        hot: Leased blocks; read only.
        stacks: int32 ``[NS]`` on the device. Stacks of the unit's layers.
        rows: int32 ``[NS, T, K]`` from `lookup`; the misses' rows are filled in.
        code: int32 ``[T, K]`` from `lookup`; the misses become hot indices.
        used: int8 ``[B, H]`` from `lookup`; zero again afterwards for mixed requests,
            and `lookup` marks no others.
        scratch: int32 ``[B, >= scratch_width(H, max_query_rows * K)]``; units may
            share it.
        plan: Out. ``src.shape[1] >= max_query_rows * K``.
        counters: int64 ``[B, NUM_COUNTERS]``, dense; added to.
        faults: int32 ``[NUM_FAULTS]``. FAULT_OVERFLOW becomes 1 when misses found
            neither slot nor overflow row (they resolve to padding), FAULT_QUERY_ROWS
            when a mixed request has more than ``max_query_rows`` rows (the misses of
            the rows beyond stay misses).
        max_query_rows: Query rows of a request, 1 + drafts.
        block_size: Tokens of a page, a power of two.
        block_stride_rows: Rows from one block of a layer's view to the next.
        tile: Misses filled at a time, a power of two.
        lru_tile: Hot rows held in registers at a time, a power of two.

    Raises:
        ValueError: With checks enabled: a shape, a dtype or a limit does not hold.
    """
    top_k = positions.shape[1]
    num_requests = state_row.shape[0]
    hot_rows = unit.slot_pos.shape[1]
    entries = max_query_rows * top_k
    if checks.ENABLED:
        _check_assign(
            positions, query_start, state_row, residency, host_table, unit, hot, stacks,
            rows, code, used, scratch, plan, counters, faults, max_query_rows,
        )  # fmt: skip
    if num_requests == 0:
        return
    if tile is None:
        # The interpreter pays per operation, the GPU for lanes without a miss too.
        tile = triton.next_power_of_2(entries)
        tile = tile if positions.device.type == "cpu" else min(tile, 1024)
    if lru_tile is None:
        # 8,192 at once take 128 registers and 64 KB of shared memory, which every
        # target has; in a loop that spills, 4,096 does not (compiled for sm_90).
        lru_tile = 8192 if hot_rows <= 8192 else 4096
    assign_kernel[(num_requests,)](
        positions,
        query_start,
        state_row,
        residency.mixed_row,
        host_table,
        unit.slot_pos,
        unit.order,
        unit.pos_slot,
        hot.hot_blocks,
        hot.overflow_blocks,
        stacks,
        rows,
        code,
        used,
        scratch,
        plan.src,
        plan.slot,
        plan.count,
        plan.hot_count,
        counters,
        faults,
        unit.pos_slot.shape[1],
        positions.stride(0),
        code.stride(0),
        rows.stride(0),
        rows.stride(1),
        host_table.stride(0),
        scratch.stride(0),
        plan.src.stride(0),
        block_stride_rows,
        MAX_ROWS=max_query_rows,
        K=top_k,
        KP=triton.next_power_of_2(top_k),
        H=hot_rows,
        HP=triton.next_power_of_2(hot_rows),
        LRU_TILE=lru_tile,
        HB=hot.hot_blocks.shape[2],
        OB=hot.overflow_blocks.shape[1],
        G=hot.hot_blocks.shape[1],
        NS=stacks.shape[0],
        NUM_COUNTERS=NUM_COUNTERS,
        BLOCK_SIZE=block_size,
        TILE=tile,
        # 8 warps hit 255 registers, 32 the cap of 64 (compiled for sm_90 at K = 2048,
        # H = 4096).
        num_warps=16,
    )


def _check_assign(
    positions, query_start, state_row, residency, host_table, unit, hot, stacks, rows,
    code, used, scratch, plan, counters, faults, max_query_rows,
) -> None:  # fmt: skip
    num_tokens, top_k = positions.shape
    num_requests = state_row.shape[0]
    num_mixed, hot_rows = unit.slot_pos.shape
    i16, i32 = torch.int16, torch.int32
    checks.expect("positions", positions, i32, None, None)
    checks.expect("query_start", query_start, i32, num_requests + 1)
    checks.expect("state_row", state_row, i32, None)
    checks.expect("mixed_row", residency.mixed_row, i32, None)
    num_states = residency.page_frame.shape[0]
    checks.expect("host_table", host_table, i32, num_states, None)
    checks.expect("slot_pos", unit.slot_pos, i32, None, None)
    checks.expect("order", unit.order, i16, num_mixed, hot_rows)
    checks.expect("pos_slot", unit.pos_slot, i16, num_mixed, None)
    checks.expect("hot_blocks", hot.hot_blocks, i32, num_mixed, None, None)
    checks.expect("overflow_blocks", hot.overflow_blocks, i32, num_mixed, None)
    checks.expect("rows", rows, i32, stacks.shape[0], num_tokens, top_k)
    checks.expect("code", code, i32, num_tokens, top_k)
    checks.expect("used", used, torch.int8, None, hot_rows)
    checks.expect("counters", counters, torch.int64, None, NUM_COUNTERS)
    checks.expect("faults", faults, i32, None)
    checks.expect_at_most("hot rows", hot_rows, MAX_HOT_ROWS)
    checks.expect_at_most("query rows * top-k", max_query_rows * top_k, MAX_CLAIMS)
    width = scratch_width(hot_rows, max_query_rows * top_k)
    checks.expect_at_most("scratch width", width, scratch.shape[1])
    checks.expect_at_most("plan entries", max_query_rows * top_k, plan.src.shape[1])
    for name, tensor in (
        ("used", used),
        ("scratch", scratch),
        ("plan.src", plan.src),
        ("plan.count", plan.count),
        ("plan.hot_count", plan.hot_count),
        ("counters", counters),
    ):
        checks.expect_at_most("requests", num_requests, tensor.shape[0])
    if plan.src.stride() != plan.slot.stride():
        raise ValueError("plan.src and plan.slot have different strides")
    for name, tensor in (
        ("slot_pos", unit.slot_pos),
        ("order", unit.order),
        ("pos_slot", unit.pos_slot),
        ("hot_blocks", hot.hot_blocks),
        ("overflow_blocks", hot.overflow_blocks),
        ("used", used),
        ("counters", counters),
    ):
        checks.expect_dense(name, tensor)


def assign_reference(
    positions: torch.Tensor,
    query_start: torch.Tensor,
    state_row: torch.Tensor,
    residency: Residency,
    host_table: torch.Tensor,
    unit: HotUnit,
    hot: HotBlocks,
    stacks: torch.Tensor,
    rows: torch.Tensor,
    code: torch.Tensor,
    used: torch.Tensor,
    plan: FetchPlan,
    counters: torch.Tensor,
    faults: torch.Tensor,
    *,
    max_query_rows: int,
    block_size: int,
    block_stride_rows: int,
) -> None:
    """`assign` in torch, with the same arguments (but no scratch) and effects."""
    top_k = positions.shape[1]
    hot_rows = unit.slot_pos.shape[1]
    over_rows = hot.overflow_blocks.shape[1] * block_size
    plan.count[: len(state_row)] = 0
    plan.hot_count[: len(state_row)] = 0
    for request, state in enumerate(state_row.tolist()):
        mixed = int(residency.mixed_row[state]) if state >= 0 else -1
        if mixed < 0:
            continue
        start, end = query_start[request : request + 2].tolist()
        if end - start > max_query_rows:
            faults[FAULT_QUERY_ROWS.value] = 1
            end = start + max_query_rows
        flat = code[start:end].reshape(-1)
        pos = positions[start:end].reshape(-1).long()
        missing = (flat == CODE_MISS.value).nonzero().flatten()
        # Distinct missed positions in the order in which they appear first.
        distinct, inverse = pos[missing].unique(return_inverse=True)
        first = torch.full((len(distinct),), len(flat))
        first = first.scatter_reduce(0, inverse, missing, "amin")
        rank = first.argsort().argsort()
        wanted = distinct[first.argsort()]

        order = unit.order[mixed].long()
        in_use = used[request, order] != 0
        free = order[~in_use]
        num_hot = min(len(wanted), len(free))
        planned = min(len(wanted), len(free) + over_rows)
        taken = free[:num_hot]
        old = unit.slot_pos[mixed, taken]
        unit.pos_slot[mixed, old[old >= 0].long()] = -1
        unit.slot_pos[mixed, taken] = wanted[:num_hot].int()
        unit.pos_slot[mixed, wanted[:num_hot]] = taken.to(torch.int16)
        new_order = torch.cat([free[num_hot:], taken, order[in_use]])
        unit.order[mixed] = new_order.to(torch.int16)
        used[request] = 0

        over = torch.arange(hot_rows, hot_rows + planned - num_hot)
        index = torch.cat([taken, over])
        pages = host_table[state, wanted[:planned] // block_size]
        host_rows = pages * block_size + wanted[:planned] % block_size
        plan.src[request, :planned] = host_rows.int()
        plan.slot[request, :planned] = index.int()
        plan.count[request] = planned
        plan.hot_count[request] = num_hot

        lost = torch.full((len(wanted) - planned,), CODE_PADDING.value)
        filled = torch.cat([CODE_HOT.value - index, lost])
        flat[missing] = filled[rank[inverse]].int()
        code[start:end] = flat.view(-1, top_k)
        _fill_reference(
            flat, missing, mixed, hot, stacks, rows[:, start:end], hot_rows,
            block_size, block_stride_rows,
        )  # fmt: skip
        counters[request, COUNTER_HITS] += hot_rows - len(free)
        counters[request, COUNTER_MISSES] += len(wanted)
        counters[request, COUNTER_OVERFLOW] += len(wanted) - num_hot
        counters[request, COUNTER_SHARED] += len(missing) - len(wanted)
        counters[request, COUNTER_STEPS] += 1
        if planned < len(wanted):
            faults[FAULT_OVERFLOW.value] = 1


def _fill_reference(
    flat: torch.Tensor,
    missing: torch.Tensor,
    mixed: int,
    hot: HotBlocks,
    stacks: torch.Tensor,
    rows: torch.Tensor,
    hot_rows: int,
    block_size: int,
    block_stride_rows: int,
) -> None:
    """Write the physical rows of former misses; a lost one becomes NO_ROW."""
    index = CODE_HOT.value - flat[missing].long()
    for n, stack in enumerate(stacks.tolist()):
        out = rows[n].reshape(-1)
        # Hot rows, then overflow rows, in one list of blocks per kind.
        for low, blocks in (
            (0, hot.hot_blocks[mixed, stack]),
            (hot_rows, hot.overflow_blocks[mixed]),
        ):
            high = hot_rows if low == 0 else 1 << 20
            own = (index >= low) & (index < high)
            local = index[own] - low
            row = blocks[local // block_size] * block_stride_rows + local % block_size
            out[missing[own]] = row.int()
        out[missing[index < 0]] = NO_ROW
        rows[n] = out.view(rows[n].shape)
