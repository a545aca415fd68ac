# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Steps of decoding requests, for the benchmark of the kernels.

A case is what a step asks of all index units: each has hot rows and picks of its own,
as the leaders of a model have, so a graph over all of them finds nothing in the caches
that the unit before has left.
"""

from dataclasses import dataclass, field

import torch

import overlay  # noqa: F401  makes hisparse_core

# isort: split
from hisparse_core.kernels.assign import assign
from hisparse_core.kernels.fetch import fetch_rows
from hisparse_core.kernels.lookup import lookup
from hisparse_core.kernels.tensors import (
    NUM_COUNTERS,
    NUM_FAULTS,
    FetchPlan,
    HotBlocks,
    HotUnit,
    Residency,
    new_fetch_plan,
    scratch_width,
)

# By name, the share of a row's picks that is neither resident nor hot; None: no
# request holds a lease, and all pages are on the device.
KINDS: dict[str, float | None] = {
    "all resident": None,
    "all hit": 0.0,
    "13 % miss": 0.13,
    "all miss": 1.0,
}
STACKS = 2
# What a whole run measures; the targets are about these.
BATCHES = (1, 16, 64)
QUERY_ROWS = (1, 4)
# Bytes that `lookup` loads and stores for a pick, of words of its own and of words that
# other picks share: position, frame, code and row, and
_PICK_BYTES = 4 * 4
_RESIDENT_BYTES = 4  # the block of the frame
_MISS_BYTES = 2  # the slot
_HIT_BYTES = 2 + 4 + 1  # the slot, its block, and the mark that it is in use


@dataclass(frozen=True)
class Sizes:
    """Shapes of the model and of the run.

    Attributes:
        top_k: K, a power of two.
        hot_rows: H.
        tokens: Context of every request.
        row_bytes: Of a row of a layer.
        block_bytes: From one block of the pool to the next.
        units: Index units.
        host_pages: Pages of one layer in host memory, at most as many as are asked for.
        block_size: Tokens of a page.
    """

    top_k: int = 2048
    hot_rows: int = 4096
    tokens: int = 142_000
    row_bytes: int = 656
    block_bytes: int = 209_920
    units: int = 22
    host_pages: int = 100_000
    block_size: int = 64

    @property
    def pages(self) -> int:
        """Pages of a request."""
        return -(-self.tokens // self.block_size)


TINY = Sizes(
    top_k=16, hot_rows=32, tokens=200, row_bytes=48, block_bytes=9600, units=2,
    host_pages=50,
)  # fmt: skip


@dataclass
class Unit:
    """One index unit: hot rows, picks, and what comes of them."""

    hot: HotUnit
    positions: torch.Tensor
    plan: FetchPlan
    before: list[torch.Tensor] = field(default_factory=list)

    def restore(self) -> None:
        """Put the hot rows back to what they were before the step."""
        now = (self.hot.slot_pos, self.hot.order, self.hot.pos_slot)
        for tensor, old in zip(now, self.before, strict=True):
            tensor.copy_(old)


class Case:
    """A batch with as many query rows for each request.

    Args:
        sizes: Shapes.
        kind: Key of KINDS.
        batch: Requests.
        query_rows: Of each request.
        host: uint8 ``[host pages * block_size, row_bytes]``, pinned for a GPU.
        device: Where it runs.
    """

    def __init__(
        self,
        sizes: Sizes,
        kind: str,
        batch: int,
        query_rows: int,
        host: torch.Tensor,
        device: torch.device,
    ) -> None:
        self.sizes, self.kind, self.batch, self.query_rows = (
            sizes, kind, batch, query_rows,
        )  # fmt: skip
        self.host, self.device = host, device
        self.miss = KINDS[kind]
        self._random = torch.Generator(device).manual_seed(batch * 100 + query_rows)
        self._make_tables()
        self._make_step_tensors()
        self.units = [self._unit() for _ in range(sizes.units)]

    def _int(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def _permutation(self, count: int) -> torch.Tensor:
        order = torch.randperm(count, generator=self._random, device=self.device)
        return order.int()

    def _make_tables(self) -> None:
        sizes, batch = self.sizes, self.batch
        shape = (batch, sizes.pages)
        frames = 1 + self._permutation(batch * sizes.pages)
        is_mixed = self.miss is not None
        page_frame = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        if not is_mixed:
            page_frame = frames.view(shape)
        blocks = 1 + self._permutation(len(frames) + 1)
        columns = [blocks, *(blocks.roll(1 + stack) for stack in range(STACKS))]
        mixed_row = self._permutation(batch) if is_mixed else self._int(batch) - 1
        self.residency = Residency(
            page_frame, torch.stack(columns, 1).contiguous(), mixed_row
        )
        # What the plain conversion reads: the blocks of stack 0, request by request.
        self.block_table = columns[1][frames.long()].view(shape).contiguous()
        num_pages = len(self.host) // sizes.block_size
        self.host_table = torch.randint(
            num_pages, shape, generator=self._random, device=self.device
        ).int()
        hot = -(-sizes.hot_rows // sizes.block_size)
        over = max(0, self.query_rows - 2) * sizes.top_k // sizes.block_size
        lease = 1 + self._permutation(batch * (STACKS * hot + over))
        split = batch * STACKS * hot
        self.hot = HotBlocks(
            lease[:split].view(batch, STACKS, hot), lease[split:].view(batch, over)
        )
        self.slab = torch.zeros(
            (1 + len(lease), sizes.block_bytes), dtype=torch.uint8, device=self.device
        )

    def _make_step_tensors(self) -> None:
        sizes, batch = self.sizes, self.batch
        tokens, k = batch * self.query_rows, sizes.top_k
        every = torch.arange(tokens, dtype=torch.int32, device=self.device)
        self.owner = every // self.query_rows
        self.query_start = self.query_rows * torch.arange(
            batch + 1, dtype=torch.int32, device=self.device
        )
        self.state_row = self._permutation(batch)
        # The conversion goes by batch row.
        self.batch_table = self.block_table[self.state_row.long()].contiguous()
        self.stacks = [self._int(1) + stack for stack in range(STACKS)]
        self.rows, self.code = self._int(1, tokens, k), self._int(tokens, k)
        self.valid, self.faults = self._int(tokens), self._int(NUM_FAULTS)
        self.used = torch.zeros(
            (batch, sizes.hot_rows), dtype=torch.int8, device=self.device
        )
        self.scratch = self._int(
            batch, scratch_width(sizes.hot_rows, self.query_rows * k)
        )
        self.counters = torch.zeros(
            (batch, NUM_COUNTERS), dtype=torch.int64, device=self.device
        )

    def _unit(self) -> Unit:
        """Hot rows and picks of one unit, in the order of the mixed rows."""
        sizes, batch, device = self.sizes, self.batch, self.device
        positions = sizes.pages * sizes.block_size
        keys = torch.rand((batch, sizes.tokens), generator=self._random, device=device)
        # The first H of a random order are hot; the others are not.
        order = keys.argsort(1).int()
        hot = order[:, : sizes.hot_rows].contiguous()
        slots = torch.arange(sizes.hot_rows, dtype=torch.int16, device=device)
        slots = slots.expand(batch, -1)
        pos_slot = torch.full((batch, positions), -1, dtype=torch.int16, device=device)
        pos_slot.scatter_(1, hot.long(), slots)
        ages = torch.rand(hot.shape, generator=self._random, device=device)
        unit = HotUnit(hot, ages.argsort(1).to(torch.int16), pos_slot)
        entries = self.query_rows * sizes.top_k
        picks = self._picks(order).contiguous()
        made = Unit(unit, picks, new_fetch_plan(batch, entries, device))
        made.before = [t.clone() for t in (unit.slot_pos, unit.order, unit.pos_slot)]
        return made

    def _picks(self, order: torch.Tensor) -> torch.Tensor:
        """Picks of all tokens; the rows of a request share most of them."""
        sizes, num_miss = self.sizes, self._misses_of_a_row()
        rows = []
        for count, start, most in (
            (sizes.top_k - num_miss, 0, sizes.hot_rows),
            (num_miss, sizes.hot_rows, sizes.tokens - sizes.hot_rows),
        ):
            # A row takes its picks from a fifth more than it needs.
            pool = order[:, start : start + min(most, count + -(-count // 5))]
            shape = (self.batch, self.query_rows, pool.shape[1])
            keys = torch.rand(shape, generator=self._random, device=self.device)
            chosen = keys.argsort(2)[..., :count]
            wide = pool.unsqueeze(1).expand(shape)
            rows.append(wide.gather(2, chosen))
        picks = torch.cat(rows, 2)
        shuffle = torch.rand(picks.shape, generator=self._random, device=self.device)
        by_mixed = picks.gather(2, shuffle.argsort(2))
        # From mixed rows to batch rows.
        mixed = self.residency.mixed_row[self.state_row.long()].long().clamp(min=0)
        return by_mixed[mixed].flatten(0, 1)

    # What is measured -----------------------------------------------------------

    def lookup(self, unit: Unit, stack: int = 0) -> None:
        """Resolve what is there."""
        lookup(
            unit.positions, self.owner, self.state_row, self.residency, unit.hot,
            self.hot, self.stacks[stack], self.rows, self.code, self.used, self.faults,
            block_size=self.sizes.block_size, valid=self.valid,
            block_stride_rows=self.sizes.block_bytes // self.sizes.row_bytes,
        )  # fmt: skip

    def assign(self, unit: Unit, stack: int = 0) -> None:
        """Give the misses their slots."""
        assign(
            unit.positions, self.query_start, self.state_row, self.residency,
            self.host_table, unit.hot, self.hot, self.stacks[stack], self.rows,
            self.code, self.used, self.scratch, unit.plan, self.counters, self.faults,
            max_query_rows=self.query_rows, block_size=self.sizes.block_size,
            block_stride_rows=self.sizes.block_bytes // self.sizes.row_bytes,
        )  # fmt: skip

    def fetch(self, unit: Unit, stack: int = 0, programs: int | None = None) -> None:
        """Bring the rows of one layer."""
        fetch_rows(
            unit.plan, self.state_row, self.residency, self.hot, self.host, self.slab,
            stack=stack, layer_offset=0, hot_rows=self.sizes.hot_rows,
            block_size=self.sizes.block_size, programs=programs,
        )  # fmt: skip

    def restore(self) -> None:
        """Put all units back."""
        self.used.zero_()
        for unit in self.units:
            unit.restore()

    def lookup_bytes(self) -> int:
        """Bytes that `lookup` of one unit loads and stores for its picks."""
        entries = self.code.numel()
        if self.miss is None:
            return entries * (_PICK_BYTES + _RESIDENT_BYTES)
        misses = len(self.code) * self._misses_of_a_row()
        hits = entries - misses
        return entries * _PICK_BYTES + misses * _MISS_BYTES + hits * _HIT_BYTES

    def _misses_of_a_row(self) -> int:
        return round((self.miss or 0.0) * self.sizes.top_k)

    def planned_rows(self) -> float:
        """Rows that a fetch of one unit brings, on average over the units."""
        counts = [int(unit.plan.count.sum()) for unit in self.units]
        return sum(counts) / len(counts)

    def check(self) -> None:
        """After `lookup` and `assign` of one unit: nothing is lost or broken.

        Raises:
            AssertionError: The case is not what it says.
        """
        assert not self.faults.any(), self.faults.tolist()
        assert (self.rows >= 0).all() and (self.valid == self.sizes.top_k).all()
        share = self.planned_rows() / (self.batch * self.sizes.top_k)
        if self.miss is not None and self.query_rows == 1:
            assert abs(share - self.miss) < 0.05, (share, self.miss)
