# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""From the indexer's picks to physical rows that hold them (D21-D24).

A unit's leader resolves; its followers reuse the plan. Each layer fetches its own
bytes of the planned rows before its attention reads them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..kernels.assign import assign
from ..kernels.fetch import fetch_rows
from ..kernels.lookup import lookup
from ..kernels.tensors import (
    NUM_COUNTERS,
    NUM_FAULTS,
    FetchPlan,
    new_fetch_plan,
    scratch_width,
)
from ..layout import IndexUnit, LatentPlace
from .batch import Batch, TokenGroup, split_tokens
from .tables import ResidencyTables

FAULT_TEXTS = (
    "a selected row is neither on the device nor covered by a hot lease",
    "the misses of a step exceed the hot buffer and its overflow rows",
    "a request has more query rows than were announced",
)


@dataclass(frozen=True)
class Resolved:
    """A group's physical rows and what has to be fetched for them.

    Attributes:
        group: The tokens.
        rows: int32 ``[NS, n, K]``, by stack of the unit; -1 pads.
        plan: Rows to fetch; None where all are resident.
    """

    group: TokenGroup
    rows: torch.Tensor
    plan: FetchPlan | None


class UnitResolver:
    """Resolves the picks of one index unit, for all its layers.

    Args:
        tables: Residency of this rank.
        index: The unit's place in the plan.
        max_query_rows: Query rows of a request that are resolved at once.
    """

    def __init__(
        self, tables: ResidencyTables, index: int, max_query_rows: int
    ) -> None:
        self.unit: IndexUnit = tables.plan.device.units[index]
        self._tables = tables
        self._hot_unit = tables.units[index]
        self._max_query_rows = max_query_rows
        self._stacks = torch.tensor(self.unit.stacks, dtype=torch.int32)
        self.counters = torch.zeros(NUM_COUNTERS, dtype=torch.int64)
        self._taken = torch.zeros_like(self.counters)
        self.resolved: list[Resolved] = []

    def take_counters(self) -> list[int]:
        """Increments since the last call, by `kernels.tensors` COUNTER_*."""
        taken = self.counters - self._taken
        self._taken += taken
        return taken.tolist()

    def start(self, batch: Batch) -> list[TokenGroup]:
        """Begin a step: split its tokens."""
        self.resolved = []
        mixed_row = self._tables.residency.mixed_row
        mixed = (batch.state_row >= 0) & (mixed_row[batch.state_row.long()] >= 0)
        return split_tokens(batch, mixed, self._max_query_rows)

    def resolve(
        self, batch: Batch, group: TokenGroup, topk: torch.Tensor, stride: int
    ) -> Resolved:
        """Resolve a group's picks; advances the LRU of mixed requests.

        Args:
            batch: The step's batch.
            group: Tokens of it.
            topk: int32 ``[T, K]``, positions picked for the step's tokens.
            stride: Physical rows from one block of a layer to the next.
        """
        positions = topk[group.tokens]
        if group.is_mixed:
            resolved = self._resolve_mixed(batch, group, positions, stride)
        else:
            resolved = self._resolve_resident(batch, group, positions, stride)
        self.resolved.append(resolved)
        return resolved

    def _resolve_resident(
        self, batch: Batch, group: TokenGroup, positions: torch.Tensor, stride: int
    ) -> Resolved:
        # The reference of `lookup` for requests without host-only pages: its kernel
        # takes the interpreter milliseconds for each token.
        tables, size = self._tables, self._tables.block_size
        valid = positions >= 0
        page = positions.clamp(min=0).long() // size
        state_row = batch.state_row[group.token_request.long()].long()
        frame = tables.residency.page_frame[state_row.unsqueeze(1), page]
        assert not (valid & (frame < 0)).any(), FAULT_TEXTS[0]
        blocks = tables.residency.frame_blocks[frame.clamp(min=0).long()]
        rows = torch.stack(
            [blocks[..., 1 + stack] * stride for stack in self.unit.stacks]
        )
        rows = torch.where(valid, rows + positions % size, -1)
        return Resolved(group, rows, None)

    def _resolve_mixed(
        self, batch: Batch, group: TokenGroup, positions: torch.Tensor, stride: int
    ) -> Resolved:
        tables, num_requests = self._tables, len(batch.state_row)
        num_tokens, top_k = positions.shape
        hot_rows = tables.plan.hot.hot_rows
        entries = self._max_query_rows * top_k
        rows = torch.empty(len(self._stacks), num_tokens, top_k, dtype=torch.int32)
        code = torch.empty(num_tokens, top_k, dtype=torch.int32)
        used = torch.zeros(num_requests, hot_rows, dtype=torch.int8)
        faults = torch.zeros(NUM_FAULTS, dtype=torch.int32)
        counters = torch.zeros(num_requests, NUM_COUNTERS, dtype=torch.int64)
        plan = new_fetch_plan(num_requests, entries, "cpu")
        # Requests without tokens in this group must not be touched.
        has_tokens = group.query_start.diff() > 0
        state_row = torch.where(has_tokens, batch.state_row, -1)
        scratch = torch.empty(
            num_requests, scratch_width(hot_rows, entries), dtype=torch.int32
        )
        sizes = {"block_size": tables.block_size, "block_stride_rows": stride}
        lookup(
            positions,
            group.token_request,
            state_row,
            tables.residency,
            self._hot_unit,
            tables.hot,
            self._stacks,
            rows,
            code,
            used,
            faults,
            **sizes,
        )
        assign(
            positions,
            group.query_start,
            state_row,
            tables.residency,
            batch.host_table,
            self._hot_unit,
            tables.hot,
            self._stacks,
            rows,
            code,
            used,
            scratch,
            plan,
            counters,
            faults,
            max_query_rows=self._max_query_rows,
            **sizes,
        )
        broken = faults.nonzero().flatten().tolist()
        assert not broken, [FAULT_TEXTS[i] for i in broken]
        self.counters += counters.sum(0)
        return Resolved(group, rows, plan)


class LayerResolver:
    """What one latent layer asks before its attention.

    Args:
        unit: The layer's unit.
        place: The layer in the plan.
        tables: Residency of this rank.
        host_rows: uint8 ``[host rows, row_bytes]``, the layer's part of the host pool.
        slab: uint8 ``[num_blocks, block_bytes]``, the device pool.
        is_leader: Whether the layer owns the unit's indexer.
    """

    def __init__(
        self,
        unit: UnitResolver,
        place: LatentPlace,
        tables: ResidencyTables,
        host_rows: torch.Tensor,
        slab: torch.Tensor,
        is_leader: bool,
    ) -> None:
        self._unit, self._place, self._tables = unit, place, tables
        self._host_rows, self._slab = host_rows, slab
        self._is_leader = is_leader
        self._stack_index = unit.unit.stacks.index(place.stack)

    def groups(
        self, batch: Batch, topk: torch.Tensor, stride: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield token indices and their physical rows, ready to be read.

        The rows of a group are good until the next one is asked for: its misses may
        take the same hot slots.

        Args:
            batch: The step's batch.
            topk: int32 ``[T, K]``, positions picked by the leader.
            stride: Physical rows from one block to the next.
        """
        if self._is_leader:
            for group in self._unit.start(batch):
                yield self._ready(batch, self._unit.resolve(batch, group, topk, stride))
        else:
            for resolved in self._unit.resolved:
                yield self._ready(batch, resolved)

    def _ready(
        self, batch: Batch, resolved: Resolved
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if resolved.plan is not None:
            has_tokens = resolved.group.query_start.diff() > 0
            fetch_rows(
                resolved.plan,
                torch.where(has_tokens, batch.state_row, -1),
                self._tables.residency,
                self._tables.hot,
                self._host_rows,
                self._slab,
                stack=self._place.stack,
                layer_offset=self._place.byte_offset,
                hot_rows=self._tables.plan.hot.hot_rows,
                block_size=self._tables.block_size,
            )
        return resolved.group.tokens, resolved.rows[self._stack_index]
