# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Offsets beyond 2**31 (trap 8).

The tensors are sparse files that take a few pages of disk, or, on a GPU, its memory.
"""

import pytest
import torch
from kernels.assign import assign
from kernels.fetch import fetch_rows
from kernels.lookup import lookup
from kernels.reset import reset_rows
from kernels.slots import gather_indexer_table, slot_mappings
from kernels.staged_rows import copy_pages, staged_rows
from kernels.staging import mark_pages
from kernels.tensors import (
    NUM_COUNTERS,
    NUM_FAULTS,
    FetchPlan,
    HotBlocks,
    HotUnit,
    Residency,
    new_fetch_plan,
)
from kernels.translate import translate

from crossing import DEVICE, ON_GPU

I32 = dict(dtype=torch.int32)


@pytest.fixture
def sparse(tmp_path):
    """Makes large tensors; unwritten bytes read as zero."""
    count = 0

    def make(dtype, *shape):
        nonlocal count
        if ON_GPU:
            try:
                return torch.zeros(shape, dtype=dtype, device=DEVICE)
            except torch.OutOfMemoryError as error:
                pytest.skip(f"needs more device memory: {error}")
        count += 1
        path = str(tmp_path / str(count))
        size = torch.Size(shape).numel()
        return torch.from_file(path, shared=True, size=size, dtype=dtype).view(shape)

    return make


def ints(*values):
    return torch.tensor(values, **I32)


ROW_BYTES, BLOCK_BYTES, BLOCK_SIZE = 1152, 209_920 // 1152 * 1152 + 1152, 64
# 34.7 and 42.2 GB into a tensor: beyond 2**31 bytes, words and 16-byte chunks.
FAR_HOST_PAGE, FAR_BLOCK = 470_000, 200_000


def far_slab(sparse):
    assert FAR_HOST_PAGE * BLOCK_SIZE * ROW_BYTES > 16 << 31
    assert FAR_BLOCK * BLOCK_BYTES > 16 << 31
    return sparse(torch.uint8, FAR_BLOCK + 1, BLOCK_BYTES)


def test_fetch_reads_and_writes_far_rows(sparse):
    host = sparse(torch.uint8, (FAR_HOST_PAGE + 1) * BLOCK_SIZE, ROW_BYTES)
    slab = far_slab(sparse)
    source = FAR_HOST_PAGE * BLOCK_SIZE + 3
    host[source] = torch.arange(ROW_BYTES).to(torch.uint8)
    plan = FetchPlan(ints([source]), ints([5]), ints(1), ints(1))
    residency = Residency(ints([0]), ints([0, 0]), ints(0))
    hot = HotBlocks(ints([[FAR_BLOCK]]), ints([0]))
    fetch_rows(
        plan, ints(0), residency, hot, host, slab, stack=0, layer_offset=16,
        hot_rows=64, block_size=BLOCK_SIZE,
    )  # fmt: skip
    start = 16 + 5 * ROW_BYTES
    assert torch.equal(slab[FAR_BLOCK, start : start + ROW_BYTES], host[source])


def test_staged_pages_come_from_and_go_to_far_places(sparse):
    page_bytes = BLOCK_SIZE * ROW_BYTES
    host = sparse(torch.uint8, FAR_HOST_PAGE + 1, page_bytes)
    slab = far_slab(sparse)
    host[FAR_HOST_PAGE] = (torch.arange(page_bytes) % 251).to(torch.uint8)
    residency = Residency(ints([0]), ints([0, 0]), ints(0))
    hot = HotBlocks(ints([[FAR_BLOCK]]), ints([0]))
    copy_pages(
        ints([FAR_HOST_PAGE]), ints(1), ints(0), residency, hot, host, slab,
        layer_offset=32,
    )  # fmt: skip
    got = slab[FAR_BLOCK, 32 : 32 + page_bytes]
    assert torch.equal(got, host[FAR_HOST_PAGE])


def test_resolve_with_far_rows_in_every_table(sparse):
    # Tables whose row of interest begins behind 2**31 elements.
    pages, far_state = 1 << 14, (1 << 17) + 1
    max_positions, far_mixed = 1 << 20, (1 << 11) + 1
    page_frame = sparse(torch.int32, far_state + 1, pages)
    pos_slot = sparse(torch.int16, far_mixed + 1, max_positions)
    page_frame[far_state] = -1
    page_frame[far_state, 9] = 1
    pos_slot[far_mixed] = -1
    mixed_row = torch.full((far_state + 1,), -1, **I32)
    mixed_row[far_state] = far_mixed
    residency = Residency(page_frame, ints([0, 0], [50, 60]), mixed_row)
    unit = HotUnit(
        torch.full((far_mixed + 1, 4), -1, **I32),
        torch.arange(4, dtype=torch.int16).repeat(far_mixed + 1, 1),
        pos_slot,
    )
    hot = HotBlocks(
        torch.full((far_mixed + 1, 1, 1), 70, **I32),
        torch.full((far_mixed + 1, 1), 80, **I32),
    )
    # The last of four tokens lies 3 * 2**30 elements into each per-token tensor, though
    # the stride itself fits in 31 bits.
    stride = 1 << 30
    positions, code, rows = (
        sparse(torch.int32, 3 * stride + 4).as_strided((4, 4), (stride, 1))
        for _ in range(3)
    )
    positions[:3] = -1
    positions[3] = ints(9 * 64 + 3, 640, -1, 641)
    rows = rows.unsqueeze(0)
    state_row, owner = ints(far_state), ints(0, 0, 0, 0)
    args = (residency, unit, hot, ints(0), rows, code)
    used = torch.zeros((1, 4), dtype=torch.int8)
    faults, valid = torch.zeros(NUM_FAULTS, **I32), ints(0, 0, 0, 0)
    shapes = dict(block_size=64, block_stride_rows=100)
    plan = new_fetch_plan(1, 16, "cpu")
    counters = torch.zeros((1, NUM_COUNTERS), dtype=torch.int64)
    table = sparse(torch.int32, far_state + 1, pages)
    table[far_state] = torch.arange(pages).int()
    for step in range(2):
        lookup(positions, owner, state_row, *args, used, faults, valid=valid, **shapes)
        assert code[3].tolist() == [67, [-2, -3][step], -1, [-2, -4][step]]
        assign(
            positions, ints(0, 4), state_row, residency, table, *args[1:], used,
            torch.zeros((1, 24), **I32), plan, counters, faults, max_query_rows=4,
            **shapes,
        )  # fmt: skip
        assert rows[0, 3].tolist() == [6003, 7000, -1, 7001]
        assert plan.count.tolist() == [[2], [0]][step]
    assert plan.src[0, :2].tolist() == [640, 641]
    rows.fill_(0)
    translate(
        code, owner, state_row, residency, hot, ints(0), rows, hot_rows=4, **shapes
    )
    assert rows[0, 3].tolist() == [6003, 7000, -1, 7001]
    assert pos_slot[far_mixed, 640:642].tolist() == [0, 1]
    marks = torch.zeros((1, pages), dtype=torch.int8)
    counts = torch.full((far_state + 1,), pages, **I32)
    mark_pages(positions, owner, state_row, counts, residency, marks, block_size=64)
    assert marks.nonzero().tolist() == [[0, 10]]
    hot.hot_blocks[far_mixed] = 90
    staged_rows(
        positions, owner, state_row, counts, residency, hot, marks.int() - 1, ints(0),
        rows, faults, **shapes,
    )  # fmt: skip
    assert rows[0, 3].tolist() == [6003, 9000, -1, 9001]
    slots = torch.zeros((2, 1), dtype=torch.int64)
    slot_mappings(
        ints(577), ints(0, 1), state_row, residency, slots, ints(0), block_size=64
    )
    assert slots.flatten().tolist() == [50 * 64 + 1, 60 * 64 + 1]
    indexer = torch.zeros((1, 12), **I32)
    gather_indexer_table(state_row, counts, residency, indexer)
    assert indexer[0].tolist() == [0] * 9 + [50, 0, 0]
    reset_rows(
        ints(far_mixed),
        unit.slot_pos.unsqueeze(0),
        unit.order.unsqueeze(0),
        pos_slot.unsqueeze(0),
    )
    assert (pos_slot[far_mixed] == -1).all()
    assert not faults.any()


def test_slots_beyond_int32():
    # 40 million blocks of 64 tokens: not a pool of today, but slots are int64.
    residency = Residency(ints([0]), ints([40_000_000, 1]), ints(-1))
    slots = torch.zeros((2, 1), dtype=torch.int64)
    slot_mappings(
        ints(5), ints(0, 1), ints(0), residency, slots, ints(0), block_size=64
    )
    assert slots.flatten().tolist() == [40_000_000 * 64 + 5, 64 + 5]
