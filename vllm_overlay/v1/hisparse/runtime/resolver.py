# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""From the indexer's picks to physical rows that hold them (D21-D26).

A unit's leader resolves; its followers reuse the parts. Each layer brings its own
bytes of the planned rows before its attention reads them.
"""

from collections.abc import Callable
from functools import partial

import torch

from ..kernels.assign import assign
from ..kernels.fetch import FetchPart
from ..kernels.lookup import lookup
from ..kernels.tensors import FetchPlan, new_fetch_plan
from ..layout import IndexUnit
from .ahead import Ahead
from .batch import Batch, TailRequest
from .buffers import ResolverBuffers
from .parts import HotPart, LayerMemory, Part
from .staging import Staging
from .tables import ResidencyTables

# Attention over some of the step's tokens: which, their physical rows int32 [n, K],
# and how many of them count, int32 [n]. Returns [n, ...].
Attention = Callable[[slice, torch.Tensor, torch.Tensor], torch.Tensor]

FAULT_TEXTS = (
    "a selected row is neither on the device nor covered by a hot lease",
    "the misses of a step exceed the hot buffer and its overflow rows",
    "a request has more query rows than were announced",
)


def check_faults(cells: list[int]) -> None:
    """Stop where the kernels found a broken state; its output would be wrong."""
    broken = [text for cell, text in zip(cells, FAULT_TEXTS) if cell]
    assert not broken, broken


class UnitResolver:
    """Resolves the picks of one index unit, for all its layers.

    Args:
        tables: Residency of this rank.
        buffers: Shared by the units.
        index: The unit's place in the plan.
        ahead: Fetches rows of followers ahead of them.

    Attributes:
        parts: What the leader resolved, until the unit's last layer has taken it.
        followers: Memory of the layers behind the leader, in their order.
    """

    def __init__(
        self,
        tables: ResidencyTables,
        buffers: ResolverBuffers,
        index: int,
        ahead: Ahead,
    ) -> None:
        self.unit: IndexUnit = tables.plan.device.units[index]
        self.parts: list[Part] = []
        self.followers: list[LayerMemory] = []
        self._ahead = ahead
        self._tables, self._buffers = tables, buffers
        self._hot_unit = tables.units[index]
        self._counters = buffers.counters[index]
        self._max_query_rows = 1 + tables.plan.hot.drafts
        device = tables.page_count.device
        self._stacks = torch.tensor(self.unit.stacks, dtype=torch.int32).to(device)
        self._staging = Staging(tables, buffers, self._stacks)
        # Row n: where the tokens of a single request with n query rows begin and end.
        ends = torch.arange(self._max_query_rows + 1, dtype=torch.int32)
        self._single = torch.stack([torch.zeros_like(ends), ends], 1).to(device)

    def resolve(self, batch: Batch, topk: torch.Tensor, stride: int) -> None:
        """Resolve a step's picks; advances the LRU of mixed requests.

        Args:
            batch: The step's batch.
            topk: int32 ``[T, K]``, positions picked for the first T tokens.
            stride: Physical rows from one block of a layer to the next.
        """
        tail = [r for r in batch.shape.tail if r.first < len(topk)]
        first = tail[0].first if tail else len(topk)
        self.parts = []
        if first:
            requests = tail[0].request if tail else batch.num_requests
            self.parts.append(self._head(batch, topk[:first], requests, stride))
        if tail:
            staged, others = self._staging.resolve(batch, topk, tail, stride)
            self.parts += staged
            for request in others:
                self._resolve_slowly(batch, topk, request, stride)
        if self._buffers.faults.device.type == "cpu":
            check_faults(self._buffers.faults.tolist())

    def warm_up(self, batch: Batch, leader: LayerMemory) -> None:
        """Compile what a prefill of a mixed request launches, before there is one.

        vLLM's own warm-up runs requests without leases. This one runs a padded request,
        of which nothing is left.

        Args:
            batch: Taken for a dummy.
            leader: The unit's first layer.
        """
        batch.set_dummy(1)
        tokens = self._max_query_rows + 1
        topk = torch.zeros_like(self._buffers.outputs(1, slice(0, tokens))[1])
        device = self._tables.plan.device
        request = TailRequest(request=0, first=0, last=tokens, host_pages=0)
        for stride in (device.rows_per_block, device.block_size):
            parts, _ = self._staging.resolve(batch, topk, [request], stride)
            self._resolve_slowly(batch, topk, request, stride)
            for part in (*parts, *self.parts):
                part.bring(leader)
            self.parts = []

    def bring(self, part: Part, memory: LayerMemory, is_first: bool) -> None:
        """Bring a part's rows for one layer.

        Only the first part is fetched ahead, that of decodes: those behind it may use
        the same slots, one after the other.
        """
        if not isinstance(part, HotPart) or not is_first:
            part.bring(memory)
        elif memory in self.followers:
            self._ahead.join(self.followers.index(memory))
            part.fetch(memory, FetchPart.OVERFLOW)
        else:
            part.bring(memory)
            hot = FetchPart.HOT
            self._ahead.start([partial(part.fetch, f, hot) for f in self.followers])

    def _head(
        self, batch: Batch, topk: torch.Tensor, num_requests: int, stride: int
    ) -> Part:
        tokens = slice(0, len(topk))
        if not batch.shape.is_mixed and not self._tables.use_kernels:
            return self._resident(batch, topk, stride)
        state_row = batch.state_row[:num_requests]
        owner = batch.token_request[tokens]
        outputs = self._buffers.outputs(len(self._stacks), tokens)
        rows, code, valid = outputs
        self._lookup(topk, owner, state_row, outputs, stride)
        if not batch.shape.is_mixed:
            return Part(tokens, rows, valid)
        query_start = batch.query_start[: num_requests + 1]
        plan = self._buffers.plan
        self._assign(topk, query_start, state_row, batch, rows, code, plan, stride)
        return HotPart(tokens, rows, valid, plan, state_row)

    def _resident(self, batch: Batch, topk: torch.Tensor, stride: int) -> Part:
        """`lookup` in torch for a batch without a hot lease."""
        tables, size = self._tables, self._tables.block_size
        owner = batch.token_request[: len(topk)].long()
        state_row = batch.state_row[owner].masked_fill_(owner < 0, -1).long()
        valid = (topk >= 0) & (state_row >= 0).unsqueeze(1)
        page = topk.clamp(min=0).long() // size
        frame = tables.residency.page_frame[state_row.unsqueeze(1), page]
        assert not (valid & (frame < 0)).any(), FAULT_TEXTS[0]
        blocks = tables.residency.frame_blocks[frame.clamp(min=0).long()]
        rows = torch.stack([blocks[..., 1 + s] * stride for s in self.unit.stacks])
        rows = torch.where(valid, rows + topk % size, -1)
        return Part(slice(0, len(topk)), rows, valid.sum(1).int())

    def _resolve_slowly(
        self, batch: Batch, topk: torch.Tensor, request: TailRequest, stride: int
    ) -> None:
        """Resolve a prefill that cannot be staged, a few query rows at a time."""
        state_row = batch.state_row[request.request : request.request + 1]
        entries = self._max_query_rows * topk.shape[1]
        for start in range(request.first, request.last, self._max_query_rows):
            stop = min(start + self._max_query_rows, request.last)
            tokens = slice(start, stop)
            positions = topk[tokens]
            owner = torch.zeros_like(batch.token_request[tokens])
            # Memory of its own: all parts of the unit are alive at once.
            plan = new_fetch_plan(1, entries, topk.device)
            outputs = self._buffers.outputs(len(self._stacks), tokens)
            rows, code, valid = outputs
            self._lookup(positions, owner, state_row, outputs, stride)
            self._assign(
                positions,
                self._single[stop - start],
                state_row,
                batch,
                rows,
                code,
                plan,
                stride,
            )
            self.parts.append(HotPart(tokens, rows, valid, plan, state_row))

    def _lookup(
        self,
        topk: torch.Tensor,
        owner: torch.Tensor,
        state_row: torch.Tensor,
        outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        stride: int,
    ) -> None:
        tables, buffers = self._tables, self._buffers
        rows, code, valid = outputs
        lookup(
            topk,
            owner,
            state_row,
            tables.residency,
            self._hot_unit,
            tables.hot,
            self._stacks,
            rows,
            code,
            buffers.used,
            buffers.faults,
            block_size=tables.block_size,
            block_stride_rows=stride,
            valid=valid,
        )

    def _assign(
        self,
        topk: torch.Tensor,
        query_start: torch.Tensor,
        state_row: torch.Tensor,
        batch: Batch,
        rows: torch.Tensor,
        code: torch.Tensor,
        plan: FetchPlan,
        stride: int,
    ) -> None:
        tables, buffers = self._tables, self._buffers
        assign(
            topk,
            query_start,
            state_row,
            tables.residency,
            batch.host_table,
            self._hot_unit,
            tables.hot,
            self._stacks,
            rows,
            code,
            buffers.used,
            buffers.scratch,
            plan,
            self._counters,
            buffers.faults,
            max_query_rows=self._max_query_rows,
            block_size=tables.block_size,
            block_stride_rows=stride,
        )


class LayerResolver:
    """What one latent layer asks before its attention.

    Args:
        unit: The layer's unit.
        memory: Where the layer's bytes lie.

    Attributes:
        is_leader: Whether the layer owns the unit's indexer.
    """

    def __init__(self, unit: UnitResolver, memory: LayerMemory) -> None:
        self._unit, self._memory = unit, memory
        latents = memory.tables.plan.device.latents
        leader, last = (latents[unit.unit.latents[i]] for i in (0, -1))
        self.is_leader, self._is_last = memory.place == leader, memory.place == last
        if not self.is_leader:
            unit.followers.append(memory)
        self._stack_index = unit.unit.stacks.index(memory.place.stack)

    def attend(
        self, batch: Batch, topk: torch.Tensor, stride: int, attention: Attention
    ) -> torch.Tensor:
        """Attend to the selected rows, wherever they are.

        A step usually has one part, and then nothing is copied. The rows of a part
        are good until the next one is brought: its misses may take the same slots.

        Args:
            batch: The step's batch.
            topk: int32 ``[T, K]``, positions picked by the leader.
            stride: Physical rows from one block to the next.
            attention: Called once for each part.

        Returns:
            ``[T, ...]``, as `attention` gives it; zero for tokens of no request.
        """
        if self.is_leader:
            self._unit.resolve(batch, topk, stride)
        parts = self._unit.parts
        out: torch.Tensor | None = None
        if self._is_last:
            # A long prefill's parts hold much memory, and nobody asks for them again.
            self._unit.parts = []
        for part in parts:
            self._unit.bring(part, self._memory, is_first=part is parts[0])
            piece = attention(part.tokens, part.rows[self._stack_index], part.valid)
            if len(parts) == 1 and len(piece) == len(topk):
                return piece
            if out is None:
                out = piece.new_zeros(len(topk), *piece.shape[1:])
            out[part.tokens] = piece
        assert out is not None, "a forward pass without tokens"
        return out
