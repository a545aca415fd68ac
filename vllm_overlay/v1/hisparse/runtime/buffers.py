# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Memory that the resolver works in; allocated once, shared by all index units.

Units run one after another on the compute stream, so each may overwrite what the one
before has left.
"""

import torch

from ..capacity import PoolPlan
from ..kernels.tensors import (
    NUM_COUNTERS,
    NUM_FAULTS,
    FetchPlan,
    new_fetch_plan,
    scratch_width,
)


class ResolverBuffers:
    """Outputs and scratch of the kernels.

    Attributes:
        used: int8 ``[R, H]``, zero between launches; R requests at most.
        scratch: int32, of `assign`.
        plan: Rows to fetch for the step's decoding requests.
        counters: int64 ``[U, R, NUM_COUNTERS]``, counted up while serving.
        faults: int32 ``[NUM_FAULTS]``, zero unless something is broken.
        marks: int8 ``[R, P]``, zero between launches.
        staging_index: int32 ``[R, P]``.
    """

    def __init__(
        self, plan: PoolPlan, num_pages: int, device: torch.device | str
    ) -> None:
        requests, top_k = plan.limits.max_num_seqs, plan.hot.topk
        tokens = plan.resolved_tokens
        query_rows, num_units = 1 + plan.hot.drafts, len(plan.device.units)
        entries = query_rows * top_k
        int32 = {"dtype": torch.int32, "device": device}
        stacks = max(len(unit.stacks) for unit in plan.device.units)
        self._rows = torch.empty((stacks, tokens, top_k), **int32)
        self._code = torch.empty((tokens, top_k), **int32)
        self._valid = torch.empty(tokens, **int32)
        self.used = torch.zeros(
            (requests, plan.hot.hot_rows), dtype=torch.int8, device=device
        )
        width = scratch_width(plan.hot.hot_rows, entries)
        self.scratch = torch.empty((requests, width), **int32)
        self.plan: FetchPlan = new_fetch_plan(requests, entries, device)
        self.counters = torch.zeros(
            (num_units, requests, NUM_COUNTERS), dtype=torch.int64, device=device
        )
        self.faults = torch.zeros(NUM_FAULTS, **int32)
        self.marks = torch.zeros((requests, num_pages), dtype=torch.int8, device=device)
        self.staging_index = torch.empty((requests, num_pages), **int32)

    def forget_counts(self) -> None:
        """Count hits, misses and faults from here on."""
        self.counters.zero_()
        self.faults.zero_()

    def outputs(
        self, num_stacks: int, tokens: slice
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, codes and counts for some of the step's tokens."""
        assert tokens.stop <= len(self._valid), (tokens, len(self._valid))
        return self._rows[:num_stacks, tokens], self._code[tokens], self._valid[tokens]


class CounterReader:
    """Reads the counters without ever waiting for the device."""

    def __init__(self, buffers: ResolverBuffers) -> None:
        self._source = (buffers.counters, buffers.faults)
        self._is_cuda = buffers.faults.is_cuda
        self._event: torch.cuda.Event | None = None
        num_units = len(buffers.counters)
        self._copies = (
            torch.zeros(num_units, NUM_COUNTERS, dtype=torch.int64),
            torch.zeros(NUM_FAULTS, dtype=torch.int32),
        )
        if self._is_cuda:
            self._copies = tuple(copy.pin_memory() for copy in self._copies)
        self._taken = torch.zeros_like(self._copies[0])

    def take(self) -> tuple[list[list[int]], list[int]]:
        """Increments of each unit since they were last taken, and the fault cells.

        On a GPU they are those of the last copy that has arrived.
        """
        if self._event is not None and not self._event.query():
            return [[0] * NUM_COUNTERS] * len(self._taken), [0] * NUM_FAULTS
        if not self._is_cuda:
            self._copy()
        counters, faults = self._copies
        taken = (counters - self._taken).tolist()
        self._taken.copy_(counters)
        cells = faults.tolist()
        if self._is_cuda:
            self._copy()
            self._event = torch.cuda.Event()
            self._event.record()
        return taken, cells

    def _copy(self) -> None:
        counters, faults = self._source
        self._copies[0].copy_(counters.sum(1), non_blocking=True)
        self._copies[1].copy_(faults, non_blocking=True)
