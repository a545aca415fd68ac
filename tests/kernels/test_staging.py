# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Prefill over host-only pages: mark, list, copy, translate (D26)."""

import pytest
import torch
from kernels.staged_rows import (
    copy_pages,
    copy_pages_reference,
    staged_rows,
    staged_rows_reference,
)
from kernels.staging import (
    list_pages,
    list_pages_reference,
    mark_pages,
    mark_pages_reference,
)

from world import World

I32 = dict(dtype=torch.int32)


class Chunk:
    """A prefill chunk over a World's requests, some of whose pages are on the host."""

    def __init__(self, top_k=33, requests=3, tokens=5, capacity=13, share=0.5, seed=0):
        # 3 stacks of 4 hot blocks, and one overflow block: 13 pages in a lease.
        self.world = world = World(
            top_k=top_k,
            hot_rows=64,
            overflow_rows=16,
            requests=requests,
            pages=13,
            seed=seed,
        )
        world.set_residency(share)
        # Half of the host-only pages keep their indexer block (D9).
        entries = world.residency.page_frame
        entries[(entries < 0) & (torch.arange(world.pages) % 2 == 0)] = -2 - 7
        self.positions = torch.stack([world.draw(0.2) for _ in range(tokens)])
        owner = [t % requests for t in range(tokens - 1)] + [requests]
        self.token_request = torch.tensor(owner, **I32)
        self.state_row = torch.tensor(world.state_of + [-1], **I32)
        self.page_count = torch.full((requests + 3,), world.pages, **I32)
        self.table = world.host_table()
        self.marks = torch.zeros((requests + 1, 13), dtype=torch.int8)
        self.index = torch.full((requests + 1, 13), 99, **I32)
        self.pages = torch.full((requests + 1, capacity), 99, **I32)
        self.count = torch.full((requests + 1,), 99, **I32)
        shape = (2, tokens, top_k)
        self.rows = torch.full(shape, 99, **I32)
        self.valid = torch.full((tokens,), 99, **I32)

    def mark(self, function=mark_pages, **args):
        function(
            self.positions, self.token_request, self.state_row, self.page_count,
            self.world.residency, self.marks, block_size=16, **args,
        )  # fmt: skip

    def list(self, function=list_pages, **args):
        function(
            self.state_row, self.page_count, self.table, self.marks, self.index,
            self.pages, self.count, **args,
        )  # fmt: skip

    def translate(self, function=staged_rows, **args):
        function(
            self.positions, self.token_request, self.state_row, self.page_count,
            self.world.residency, self.world.hot, self.index, self.world.stacks,
            self.rows, self.world.faults, block_size=16,
            block_stride_rows=self.world.block_rows, valid=self.valid, **args,
        )  # fmt: skip

    def copy(self, stack, function=copy_pages, slab=None, **args):
        world = self.world
        function(
            self.pages, self.count, self.state_row, world.residency, world.hot,
            world.host[stack].view(-1, 16 * world.row_bytes),
            world.slab if slab is None else slab,
            layer_offset=world.layer_offset, **args,
        )  # fmt: skip


@pytest.mark.parametrize("top_k", [1, 33, 64])
@pytest.mark.parametrize(
    "requests, share, tokens", [(1, 0.0, 1), (3, 0.5, 1), (3, 0.5, 4), (3, 1.0, None)]
)
def test_a_chunk_reads_the_bytes_of_its_positions(
    top_k, requests, share, tokens, races
):
    chunk = Chunk(top_k, requests, tokens=7, share=share)
    world = chunk.world
    chunk.mark(tokens=tokens)
    chunk.list()
    chunk.translate(tokens=tokens)
    assert (chunk.rows[:, -1] == -1).all() and chunk.valid[-1] == 0
    assert torch.equal(chunk.valid[:-1], (chunk.positions >= 0).sum(1).int()[:-1])
    for i, stack in enumerate(world.stacks.tolist()):
        chunk.copy(stack)
        for token, request in enumerate(chunk.token_request.tolist()[:-1]):
            rows = chunk.rows[i, token]
            world.check_bytes(request, chunk.positions[token], rows, stack)
    assert not world.faults.any()
    assert (share < 1.0) == bool(chunk.count.any())


@pytest.mark.parametrize("capacity, tile", [(13, None), (2, None), (13, 4), (2, 4)])
def test_marks_and_lists_equal_the_references(capacity, tile, races):
    mine, theirs = Chunk(capacity=capacity), Chunk(capacity=capacity)
    mine.page_count[mine.world.state_of[1]] = 6
    theirs.page_count[theirs.world.state_of[1]] = 6
    mine.mark()
    theirs.mark(mark_pages_reference)
    assert torch.equal(mine.marks, theirs.marks) and mine.marks.any()
    mine.list(tile=tile)
    theirs.list(list_pages_reference)
    assert (mine.count[:3] > 2).any() and mine.count[3] == 0
    for name in ("index", "pages", "count", "marks"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
    assert not mine.marks.any()
    mine.translate()
    theirs.translate(staged_rows_reference)
    for name in ("rows", "valid"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
    assert torch.equal(mine.world.faults, theirs.world.faults)


def test_pages_over_the_capacity_are_counted_but_not_staged():
    chunk = Chunk(requests=1, capacity=3)
    chunk.mark()
    marked = int(chunk.marks.sum())
    chunk.list()
    assert chunk.count.tolist() == [marked, 0] and marked > 3
    staged = chunk.index[0][chunk.index[0] >= 0]
    assert sorted(staged.tolist()) == [0, 1, 2]
    chunk.translate()
    assert chunk.world.faults.tolist() == [1, 0, 0]


def test_the_list_of_a_request_is_in_the_order_of_its_pages():
    chunk = Chunk(tokens=12)
    chunk.mark()
    marks = chunk.marks.clone()
    chunk.list()
    for request in range(3):
        pages = marks[request].nonzero().flatten()
        want = chunk.world.host_pages[request, pages]
        assert len(want) and torch.equal(chunk.pages[request, : len(want)], want)
        assert chunk.index[request, pages].tolist() == list(range(len(want)))


def test_a_request_without_a_lease_has_no_staged_rows():
    chunk = Chunk(requests=1, share=0.0)
    chunk.mark()
    chunk.list()
    chunk.world.residency.mixed_row.fill_(-1)
    before = chunk.world.slab.clone()
    chunk.copy(0)
    assert torch.equal(chunk.world.slab, before)
    chunk.translate()
    assert (chunk.rows == -1).all() and chunk.world.faults.tolist() == [1, 0, 0]


def test_marks_of_several_launches_add_up_and_the_next_chunk_starts_clean():
    chunk = Chunk()
    chunk.mark()
    first = chunk.marks.clone()
    chunk.positions = (chunk.positions + 16).clamp(max=13 * 16 - 1)
    chunk.mark()
    assert (chunk.marks >= first).all() and (chunk.marks != first).any()
    chunk.list()
    chunk.positions.fill_(-1)
    chunk.mark()
    chunk.list()
    assert not chunk.count.any()


@pytest.mark.parametrize("programs, tile", [(None, None), (1, 16), (3, 32)])
def test_only_the_listed_pages_are_copied(programs, tile, races):
    chunk = Chunk(capacity=5)
    chunk.mark()
    chunk.list()
    world = chunk.world
    before, want = world.slab.clone(), world.slab.clone()
    chunk.copy(0, copy_pages_reference, want)
    chunk.copy(0, programs=programs, tile=tile)
    assert torch.equal(world.slab, want)
    changed = (want != before).any(1).nonzero().flatten()
    leased = torch.cat(
        [world.hot.hot_blocks.flatten(), world.hot.overflow_blocks[:, 0]]
    )
    assert len(changed) == chunk.count.clamp(max=5).sum()
    assert torch.isin(changed, leased).all()
