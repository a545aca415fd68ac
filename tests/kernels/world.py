# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""A small engine around the kernels: requests, pages, frames, leases and bytes.

`World.step` resolves and fetches like a decode step, and compares the result in three
ways: bit by bit with the torch references, with the OrderedDict oracle, and by the
bytes that attention would read. Freed blocks are poisoned.
"""

import copy
import dataclasses

import numpy as np
import torch
from kernels.assign import assign, assign_reference
from kernels.fetch import FetchPart, fetch_rows
from kernels.lookup import lookup, lookup_reference
from kernels.reset import reset_rows
from kernels.tensors import (
    NUM_COUNTERS,
    NUM_FAULTS,
    HotBlocks,
    HotUnit,
    Residency,
    new_fetch_plan,
    new_hot_state,
    scratch_width,
)

from lru_oracle import HotBuffer

POISON = 0xEE


class World:
    """Requests 0..B-1 with ``pages`` pages each; all pages start on the host only."""

    def __init__(
        self,
        *,
        top_k: int,
        hot_rows: int,
        requests: int = 1,
        query_rows: int = 1,
        pages: int = 8,
        block_size: int = 16,
        stacks: int = 3,
        unit_stacks: tuple[int, ...] = (2, 0),
        row_bytes: int = 16,
        overflow_rows: int | None = None,
        spare_blocks: int = 0,
        seed: int = 0,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.top_k, self.hot_rows, self.query_rows = top_k, hot_rows, query_rows
        self.block_size, self.pages, self.num_stacks = block_size, pages, stacks
        self.stacks = torch.tensor(unit_stacks, dtype=torch.int32)
        self.row_bytes = row_bytes
        self.entries = query_rows * top_k
        if overflow_rows is None:
            overflow_rows = self.entries
        blocks_of = lambda rows: -(-rows // block_size)  # noqa: E731
        hot_blocks, over_blocks = blocks_of(hot_rows), blocks_of(overflow_rows)
        self.num_mixed, num_states = requests + 1, requests + 3
        # Two layers per stack and a gap at the end; a whole number of rows.
        self.block_rows = 2 * block_size + 3
        self.layer_offset = block_size * row_bytes
        lease = stacks * hot_blocks + over_blocks
        num_blocks = 1 + self.num_mixed * lease + requests * pages * (1 + stacks)
        num_blocks += spare_blocks
        self.slab = torch.full(
            (num_blocks, self.block_rows * row_bytes), POISON, dtype=torch.uint8
        )
        self.free_blocks = self.rng.permutation(np.arange(1, num_blocks)).tolist()
        num_host = requests * pages + 1
        ids = self.rng.permutation(np.arange(1, num_host)).reshape(requests, pages)
        self.host_pages = torch.tensor(ids, dtype=torch.int32)
        # One host tensor per stack: one layer of it is looked at.
        self.host = [
            torch.from_numpy(
                self.rng.integers(0, 256, (num_host * block_size, row_bytes), np.uint8)
            )
            for _ in range(stacks)
        ]
        self.state_of = self.rng.permutation(num_states)[:requests].tolist()
        self.mixed_of = self.rng.permutation(self.num_mixed)[:requests].tolist()
        self.residency = Residency(
            torch.full((num_states, pages), -1, dtype=torch.int32),
            torch.zeros((1 + requests * pages, 1 + stacks), dtype=torch.int32),
            torch.full((num_states,), -1, dtype=torch.int32),
        )
        for state, mixed in zip(self.state_of, self.mixed_of):
            self.residency.mixed_row[state] = mixed
        self.free_frames = list(range(1, 1 + requests * pages))
        take = lambda *shape: torch.tensor(  # noqa: E731
            [self.free_blocks.pop() for _ in range(int(np.prod(shape)))],
            dtype=torch.int32,
        ).view(shape)
        self.hot = HotBlocks(
            take(self.num_mixed, stacks, hot_blocks), take(self.num_mixed, over_blocks)
        )
        self.state = new_hot_state(
            2, self.num_mixed, hot_rows, pages * block_size, "cpu"
        )
        self.unit = HotUnit(self.state[0][1], self.state[1][1], self.state[2][1])
        self.plan = new_fetch_plan(requests + 1, self.entries, "cpu")
        self.used = torch.zeros((requests + 1, hot_rows), dtype=torch.int8)
        self.scratch = torch.zeros(
            (requests + 1, scratch_width(hot_rows, self.entries)), dtype=torch.int32
        )
        self.counters = torch.zeros((requests + 1, NUM_COUNTERS), dtype=torch.int64)
        self.faults = torch.zeros(NUM_FAULTS, dtype=torch.int32)
        self.oracles = [HotBuffer(hot_rows) for _ in range(requests)]

    # Residency ----------------------------------------------------------------

    def frame(self, request: int, page: int) -> int:
        return int(self.residency.page_frame[self.state_of[request], page])

    def restore(self, request: int, page: int) -> None:
        """Give a page a frame and its bytes."""
        assert self.frame(request, page) < 0
        frame = self.free_frames.pop()
        blocks = [self.free_blocks.pop() for _ in range(1 + self.num_stacks)]
        self.residency.frame_blocks[frame] = torch.tensor(blocks, dtype=torch.int32)
        self.residency.page_frame[self.state_of[request], page] = frame
        host_page = int(self.host_pages[request, page])
        for stack in range(self.num_stacks):
            first = host_page * self.block_size
            page_bytes = self.host[stack][first : first + self.block_size].flatten()
            end = self.layer_offset + len(page_bytes)
            self.slab[blocks[1 + stack], self.layer_offset : end] = page_bytes

    def evict(self, request: int, page: int) -> None:
        """Leave a page on the host only; its blocks are poisoned and free."""
        frame = self.frame(request, page)
        self.residency.page_frame[self.state_of[request], page] = -1
        blocks = self.residency.frame_blocks[frame].tolist()
        self.slab[blocks] = POISON
        self.free_blocks[:0] = blocks
        self.free_frames.insert(0, frame)

    def set_residency(self, share: float) -> None:
        """Make each page resident with this probability, changing what is not so."""
        for request in range(len(self.state_of)):
            for page in range(self.pages):
                wanted = self.rng.random() < share
                if wanted and self.frame(request, page) < 0:
                    self.restore(request, page)
                elif not wanted and self.frame(request, page) >= 0:
                    self.evict(request, page)

    def replace_request(self, request: int) -> None:
        """Another request takes over state row and mixed row."""
        for page in range(self.pages):
            if self.frame(request, page) >= 0:
                self.evict(request, page)
        for layer in self.host:
            for page in self.host_pages[request].tolist():
                rows = layer[page * self.block_size : (page + 1) * self.block_size]
                rows.copy_(255 - rows)
        mixed = torch.tensor([self.mixed_of[request], -1], dtype=torch.int32)
        reset_rows(mixed, *self.state)
        self.oracles[request] = HotBuffer(self.hot_rows)

    def host_table(self) -> torch.Tensor:
        """Host pages by state row; rows of no request have garbage."""
        table = torch.full_like(self.residency.page_frame, 1 << 20)
        table[self.state_of] = self.host_pages
        return table

    # Positions ----------------------------------------------------------------

    def draw(self, padding: float = 0.0) -> torch.Tensor:
        """Distinct random positions of one query row; some entries become -1."""
        limit = self.pages * self.block_size
        row = self.rng.permutation(limit)[: self.top_k]
        row = np.concatenate([row, np.full(self.top_k - len(row), -1)])
        row[self.rng.random(self.top_k) < padding] = -1
        return torch.tensor(row, dtype=torch.int32)

    def drift(self, row: torch.Tensor, keep: float) -> torch.Tensor:
        """Keep a share of a row, in another order, and draw the rest anew."""
        kept = row[torch.from_numpy(self.rng.random(self.top_k) < keep)]
        fresh = self.draw()
        fresh = fresh[~torch.isin(fresh, kept)]
        mixed = torch.cat([kept, fresh])[: self.top_k]
        return mixed[torch.from_numpy(self.rng.permutation(self.top_k))]

    # A step -------------------------------------------------------------------

    def step(
        self,
        rows_of: list[list[torch.Tensor]],
        batch: list[int] | None = None,
        pad_requests: int = 0,
        pad_tokens: int = 0,
        reverse_fetch: bool = False,
        tile: int | None = None,
        tokens: int | None = None,
        lru_tile: int | None = None,
    ) -> torch.Tensor:
        """Resolve and fetch the query rows of the batch's requests, and compare.

        Args:
            rows_of: Query rows of each batch row.
            batch: Request of each batch row; default all, in order.
            pad_requests: Padded batch rows at the end.
            pad_tokens: Padded tokens at the end, half with garbage request ids.
            reverse_fetch: Fetch overflow rows before hot rows, as two launches.
            tile: Misses that `assign` fills at a time.
            tokens: Query tokens of a program of `lookup`.
            lru_tile: Hot rows that `assign` holds at a time.

        Returns:
            Physical rows ``[NS, T, K]`` of the real tokens.
        """
        batch = list(range(len(rows_of))) if batch is None else batch
        token_rows = [row for rows in rows_of for row in rows]
        junk = torch.arange(self.top_k, dtype=torch.int32)
        positions = torch.stack(token_rows + [junk] * pad_tokens)
        owner = [b for b, rows in enumerate(rows_of) for _ in rows]
        garbage = [len(batch) if i % 2 else 1 << 30 for i in range(pad_tokens)]
        token_request = torch.tensor(owner + garbage, dtype=torch.int32)
        starts = np.cumsum([0] + [len(rows) for rows in rows_of])
        query_start = torch.tensor(
            starts.tolist() + [len(token_rows)] * pad_requests, dtype=torch.int32
        )
        states = [self.state_of[request] for request in batch] + [-1] * pad_requests
        state_row = torch.tensor(states, dtype=torch.int32)
        table = self.host_table()
        shape = (len(self.stacks), *positions.shape)
        rows = torch.full(shape, 12345, dtype=torch.int32)
        code = torch.full_like(positions, 12345)
        valid = torch.full((len(positions),), 12345, dtype=torch.int32)
        twin = copy.deepcopy(self)
        twin_out = [rows.clone(), code.clone(), valid.clone()]
        before = self.counters.clone()

        for world, out, resolve in (
            (self, (rows, code, valid), (lookup, assign)),
            (twin, twin_out, (lookup_reference, assign_reference)),
        ):
            shapes = dict(block_size=self.block_size, block_stride_rows=self.block_rows)
            resolve[0](
                positions, token_request, state_row, world.residency, world.unit,
                world.hot, world.stacks, *out[:2], world.used, world.faults,
                valid=out[2], **shapes, **({} if world is twin else {"tokens": tokens}),
            )  # fmt: skip
            scratch = () if world is twin else (world.scratch,)
            tiles = {} if world is twin else {"tile": tile, "lru_tile": lru_tile}
            resolve[1](
                positions, query_start, state_row, world.residency, table, world.unit,
                world.hot, world.stacks, *out[:2], world.used, *scratch, world.plan,
                world.counters, world.faults, max_query_rows=self.query_rows, **shapes,
                **tiles,
            )  # fmt: skip
        self._compare_with_reference(twin, (rows, code, valid), twin_out)
        assert not self.used.any()
        self.check_maps()
        assert (rows[:, len(token_rows) :] == -1).all() and not valid[
            len(token_rows) :
        ].any()
        parts = [FetchPart.ALL]
        if reverse_fetch:
            parts = [FetchPart.OVERFLOW, FetchPart.HOT]
        self._compare_with_oracle(rows_of, batch, code, starts, before)
        for i, stack in enumerate(self.stacks.tolist()):
            for part in parts:
                fetch_rows(
                    self.plan, state_row, self.residency, self.hot, self.host[stack],
                    self.slab, stack=stack, layer_offset=self.layer_offset,
                    hot_rows=self.hot_rows, block_size=self.block_size, part=part,
                )  # fmt: skip
            for token, (b, row) in enumerate(zip(owner, token_rows)):
                self.check_bytes(batch[b], row, rows[i, token], stack)
        assert torch.equal(
            valid[: len(token_rows)], (torch.stack(token_rows) >= 0).sum(1)
        )
        return rows[:, : len(token_rows)]

    def _compare_with_reference(self, twin: "World", out, twin_out) -> None:
        for name, have, want in zip(("rows", "code", "valid"), out, twin_out):
            assert torch.equal(have, want), name
        for name in ("unit", "plan"):
            mine, theirs = getattr(self, name), getattr(twin, name)
            for field in dataclasses.fields(mine):
                have, want = getattr(mine, field.name), getattr(theirs, field.name)
                assert torch.equal(have, want), f"{name}.{field.name}"
        for name in ("used", "counters", "faults"):
            assert torch.equal(getattr(self, name), getattr(twin, name)), name

    def _compare_with_oracle(self, rows_of, batch, code, starts, before) -> None:
        for b, (request, rows) in enumerate(zip(batch, rows_of)):
            lists = [
                [
                    pos
                    for pos in row.tolist()
                    if pos >= 0 and not self.resident(request, pos)
                ]
                for row in rows
            ]
            if self.residency.mixed_row[self.state_of[request]] < 0:
                assert not any(lists) and self.plan.count[b] == 0
                continue
            oracle = self.oracles[request]
            want = oracle.step(lists)
            for r, row in enumerate(rows):
                for k, pos in enumerate(row.tolist()):
                    got = int(code[int(starts[b]) + r, k])
                    if pos < 0:
                        assert got == -1
                    elif self.resident(request, pos):
                        frame = self.frame(request, pos // self.block_size)
                        offset = pos % self.block_size
                        assert got == frame * self.block_size + offset
                    else:
                        assert got == -3 - want.index[pos]
            count = int(self.plan.count[b])
            pages = self.host_pages[request]
            sources = [
                int(pages[pos // self.block_size]) * self.block_size
                + pos % self.block_size
                for pos in want.fetched
            ]
            assert self.plan.src[b, :count].tolist() == sources
            indices = [want.index[pos] for pos in want.fetched]
            assert self.plan.slot[b, :count].tolist() == indices
            overflow = sum(index >= self.hot_rows for index in indices)
            assert int(self.plan.hot_count[b]) == count - overflow
            mixed = self.mixed_of[request]
            assert self.unit.order[mixed].tolist() == list(oracle.slots)
            held = [oracle.slots[slot] for slot in range(self.hot_rows)]
            held = [-1 if pos is None else pos for pos in held]
            assert self.unit.slot_pos[mixed].tolist() == held
            added = (self.counters - before)[b].tolist()
            assert added == [want.hits, count, overflow, want.shared, 1]

    def resident(self, request: int, pos: int) -> bool:
        return self.frame(request, pos // self.block_size) >= 0

    def check_bytes(self, request, positions, rows, stack) -> None:
        """Attention, reading these rows, must see the positions' host bytes."""
        flat = self.slab.flatten()[self.layer_offset :]
        picked = positions >= 0
        assert (rows[~picked] == -1).all() and (rows[picked] >= self.block_rows).all()
        pos = positions[picked].long()
        pages = self.host_pages[request, pos // self.block_size]
        want = self.host[stack][pages * self.block_size + pos % self.block_size]
        view = flat.unfold(0, self.row_bytes, self.row_bytes)
        assert torch.equal(view[rows[picked].long()], want)

    def check_maps(self) -> None:
        """The invariant of HotUnit, in all rows."""
        slot_pos, pos_slot = self.unit.slot_pos, self.unit.pos_slot
        mixed, slot = (slot_pos >= 0).nonzero(as_tuple=True)
        named = torch.full_like(pos_slot, -1)
        named[mixed, slot_pos[mixed, slot].long()] = slot.to(torch.int16)
        assert torch.equal(pos_slot, named)


def stream(
    world: World,
    steps: int,
    keep: float,
    residency: tuple[float, ...],
    padding: float = 0.0,
    **step_args,
) -> None:
    """Run a random stream; positions drift, residency changes."""
    requests = len(world.state_of)
    current = [world.draw() for _ in range(requests)]
    for step in range(steps):
        world.set_residency(residency[step % len(residency)])
        rows_of = []
        for request in range(requests):
            rows = []
            for _ in range(world.query_rows):
                current[request] = world.drift(current[request], keep)
                row = current[request].clone()
                holes = torch.from_numpy(world.rng.random(world.top_k) < padding)
                row[holes] = -1
                rows.append(row)
            rows_of.append(rows)
        world.step(rows_of, **step_args)


def row_of(world: World, positions) -> torch.Tensor:
    """A query row with the given positions, padded at the end."""
    positions = list(positions) + [-1] * (world.top_k - len(positions))
    return torch.tensor(positions, dtype=torch.int32)
