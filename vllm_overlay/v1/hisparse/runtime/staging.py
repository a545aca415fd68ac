# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Prefill over host-only pages: which tokens can be staged together (D26)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..kernels.staged_rows import staged_rows
from ..kernels.staging import list_pages, mark_pages
from .batch import Batch, TailRequest
from .buffers import ResolverBuffers
from .parts import StagedPart
from .tables import ResidencyTables


@dataclass(frozen=True)
class _Span:
    """Consecutive requests of the tail, or some tokens of one."""

    requests: slice
    tokens: slice


class Staging:
    """Stages the host-only pages that a prefill's top-k touches.

    The pages of a request have room in its lease. Where its host-only pages are no
    more than that, which the host knows, nothing is waited for. Otherwise the device
    counts what is touched, and the tokens are halved until it fits, or until they
    select no more rows than such pages have: then their rows are fewer bytes.

    Args:
        tables: Residency of this rank.
        buffers: Shared by the units.
        stacks: int32 ``[NS]``, stacks of the unit.
    """

    def __init__(
        self, tables: ResidencyTables, buffers: ResolverBuffers, stacks: torch.Tensor
    ) -> None:
        self._tables, self._buffers, self._stacks = tables, buffers, stacks
        self.capacity = tables.plan.lease_blocks

    def resolve(
        self,
        batch: Batch,
        topk: torch.Tensor,
        tail: Sequence[TailRequest],
        stride: int,
    ) -> tuple[list[StagedPart], list[TailRequest]]:
        """Stage the tail's pages.

        Args:
            batch: The step's batch.
            topk: int32 ``[T, K]``, of the whole step.
            tail: Consecutive requests.
            stride: Physical rows from one block of a layer to the next.

        Returns:
            The parts, and the requests that are not staged: some of their tokens touch
            more pages than the lease has blocks, and select fewer rows.
        """
        fits = all(request.host_pages <= self.capacity for request in tail)
        whole = _Span(
            slice(tail[0].request, tail[-1].request + 1),
            slice(tail[0].first, tail[-1].last),
        )
        part = self._stage(batch, topk, whole, stride, is_sure=fits)
        if part is not None:
            return [part], []
        parts: list[StagedPart] = []
        others = []
        for request in tail:
            tokens = slice(request.first, request.last)
            row = slice(request.request, request.request + 1)
            pieces = []
            for piece in self._pieces(batch, topk, _Span(row, tokens), stride):
                if piece is None:
                    others.append(request)
                    break
                pieces.append(piece)
            else:
                parts += pieces
        return parts, others

    def _pieces(
        self, batch: Batch, topk: torch.Tensor, span: _Span, stride: int
    ) -> Iterator[StagedPart | None]:
        """Parts of one request; None for tokens whose rows are fewer bytes."""
        part = self._stage(batch, topk, span, stride, is_sure=False)
        tokens = span.tokens
        most_rows = (tokens.stop - tokens.start) * topk.shape[1]
        # A lease has room for what one token selects, and more.
        if part is not None or most_rows <= self.capacity * self._tables.block_size:
            yield part
            return
        middle = (tokens.start + tokens.stop) // 2
        for half in (slice(tokens.start, middle), slice(middle, tokens.stop)):
            yield from self._pieces(batch, topk, _Span(span.requests, half), stride)

    def _stage(
        self,
        batch: Batch,
        topk: torch.Tensor,
        span: _Span,
        stride: int,
        is_sure: bool,
    ) -> StagedPart | None:
        """Stage a span, unless more pages are touched than there is room for."""
        tables, buffers = self._tables, self._buffers
        state_row = batch.state_row[span.requests]
        owner = batch.token_request[span.tokens] - span.requests.start
        positions = topk[span.tokens]
        marks = buffers.marks[: len(state_row)]
        index = buffers.staging_index[: len(state_row)]
        pages = index.new_empty((len(state_row), self.capacity))
        count = index.new_empty(len(state_row))
        residency, page_count = tables.residency, tables.page_count
        size = {"block_size": tables.block_size}
        mark_pages(positions, owner, state_row, page_count, residency, marks, **size)
        list_pages(state_row, page_count, batch.host_table, marks, index, pages, count)
        if not is_sure and int(count.max()) > self.capacity:
            return None
        rows, _, valid = buffers.outputs(len(self._stacks), span.tokens)
        staged_rows(
            positions,
            owner,
            state_row,
            page_count,
            residency,
            tables.hot,
            index,
            self._stacks,
            rows,
            buffers.faults,
            block_stride_rows=stride,
            valid=valid,
            **size,
        )
        return StagedPart(span.tokens, rows, valid, pages, count, state_row)
