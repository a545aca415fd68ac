# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Residency on the device, by state row (D18), and what is derived from it."""

import numpy as np
import torch

from ..capacity import PoolPlan
from ..kernels.reset import reset_rows
from ..kernels.slots import gather_indexer_table, slot_mappings
from ..kernels.tensors import HotBlocks, HotUnit, Residency, new_hot_state
from ..messages import INDEXER_ONLY, NO_FRAME, HotLease, StepUpdate
from ..pool import NULL_BLOCK
from .batch import NO_ROW, Batch, StepShape
from .words import WordTables, send

PAD_SLOT = -1


class ResidencyTables:
    """Tables of frames, leases and hot rows; one for all layers.

    Attributes:
        residency: Page tables, see `kernels.tensors.Residency`.
        page_count: int32 ``[S]``, pages of the request in each state row.
        hot: Blocks of the leases.
        units: LRU state of each index unit.
        lease_row: Lease of each state row as the host knows it, -1 for none.
        host_pages: Pages of each state row that are on the host only.
        use_kernels: Whether slots and tables are computed by the kernels. On the CPU
            torch does it: Triton's interpreter takes milliseconds for a launch.
    """

    def __init__(
        self, plan: PoolPlan, num_state_rows: int, device: torch.device | str
    ) -> None:
        self.plan = plan
        self.block_size = plan.device.block_size
        num_pages = plan.pages(plan.limits.max_model_len) + 1
        num_rows, stacks = plan.mixed_rows, plan.device.num_stacks
        self._words = WordTables(
            {
                "page_frame": (num_state_rows, num_pages),
                "frame_blocks": (plan.max_frames, plan.device.frame_blocks),
                "mixed_row": (num_state_rows,),
                "page_count": (num_state_rows,),
                "hot_blocks": (num_rows, stacks, plan.hot_blocks),
                "overflow_blocks": (num_rows, plan.overflow_blocks),
            },
            device,
        )
        tables = self._words.tables
        tables["page_frame"].fill_(NO_FRAME)
        tables["mixed_row"].fill_(NO_ROW)
        self.residency = Residency(
            tables["page_frame"], tables["frame_blocks"], tables["mixed_row"]
        )
        self.page_count = tables["page_count"]
        self.hot = HotBlocks(tables["hot_blocks"], tables["overflow_blocks"])
        self._hot_state = new_hot_state(
            len(plan.device.units),
            num_rows,
            plan.hot.hot_rows,
            num_pages * self.block_size,
            device,
        )
        self.units = [HotUnit(*state) for state in zip(*self._hot_state)]
        self.lease_row = np.full(num_state_rows, NO_ROW, dtype=np.int32)
        self.host_pages = np.zeros(num_state_rows, dtype=np.int64)
        self._entries = np.full((num_state_rows, num_pages), NO_FRAME, dtype=np.int32)
        self._num_entries = np.zeros(num_state_rows, dtype=np.int64)
        self._staged: set[int] = set()
        self.use_kernels = self.page_count.is_cuda

    # --- what changed -----------------------------------------------------------

    def apply(self, update: StepUpdate, state_rows: dict[str, int]) -> None:
        """Apply a step's changes.

        Args:
            update: From the scheduler.
            state_rows: State row of each request on this worker.
        """
        width = self.plan.device.frame_blocks
        for frame, blocks in update.frames.items():
            self._words.put("frame_blocks", frame * width, blocks)
        granted = []
        for request_id, change in update.requests.items():
            row = state_rows[request_id]
            if change.start == 0:
                self._forget(row, len(change.entries))
            self._set_entries(row, change.start, change.entries)
            self._change_entries(row, change.changed)
            if change.lease is not None:
                self._grant(row, change.lease)
                granted.append(change.lease.row)
            if change.start == 0 or change.lease is not None:
                self._words.put("mixed_row", row, [self.lease_row[row]])
        self._words.flush()
        self._reset(granted)

    def warm_up(self) -> None:
        """Compile what only steps with leases launch, before there is one."""
        self._reset([NO_ROW])

    def begin_step(self, counts: dict[int, int]) -> StepShape:
        """Look at the batch that comes, and make its leases ready for it.

        Staging writes over hot rows, so none of them may be found in the step that
        stages, nor in the next one.

        Args:
            counts: Tokens of the step by state row, in the order of the batch.
        """
        rows = list(counts)
        shape = StepShape.of(
            list(counts.values()),
            [bool(self.lease_row[row] >= 0) for row in rows],
            [int(self.host_pages[row]) for row in rows],
            max_query_rows=1 + self.plan.hot.drafts,
        )
        leases = {int(self.lease_row[rows[r.request]]) for r in shape.tail}
        staged = leases - {NO_ROW}
        self._reset(sorted(staged | self._staged))
        self._staged = staged
        return shape

    def _reset(self, lease_rows: list[int]) -> None:
        """Empty the hot buffers of leases, in all units."""
        if lease_rows:
            rows = torch.tensor(lease_rows, dtype=torch.int32)
            reset_rows(send(rows, self.page_count.device), *self._hot_state)

    def _forget(self, row: int, num_kept: int) -> None:
        """Forget the request that had the row, but for entries that follow anew."""
        self.lease_row[row] = NO_ROW
        self.host_pages[row] = 0
        stale = int(self._num_entries[row]) - num_kept
        if stale > 0:
            first = row * self._entries.shape[1] + num_kept
            self._words.put("page_frame", first, [NO_FRAME] * stale)
        self._entries[row] = NO_FRAME
        self._num_entries[row] = 0

    def _set_entries(self, row: int, start: int, entries: list[int]) -> None:
        end = start + len(entries)
        self._words.put("page_frame", row * self._entries.shape[1] + start, entries)
        self._words.put("page_count", row, [end])
        self._entries[row, start:end] = entries
        self._num_entries[row] = end
        self.host_pages[row] += sum(entry < 0 for entry in entries)

    def _change_entries(self, row: int, changed: dict[int, int]) -> None:
        first, known = row * self._entries.shape[1], self._entries[row]
        places = (first + page for page in changed)
        self._words.put_at("page_frame", places, changed.values())
        for page, entry in changed.items():
            self.host_pages[row] += int(entry < 0) - int(known[page] < 0)
            known[page] = entry

    def _grant(self, row: int, lease: HotLease) -> None:
        self.lease_row[row] = lease.row
        num_hot = self.hot.hot_blocks[0].numel()
        hot, overflow = lease.blocks[:num_hot], lease.blocks[num_hot:]
        self._words.put("hot_blocks", lease.row * num_hot, hot)
        self._words.put("overflow_blocks", lease.row * len(overflow), overflow)

    # --- what follows from it ---------------------------------------------------

    def slots(self, batch: Batch, positions: torch.Tensor, out: torch.Tensor) -> None:
        """Where tokens are written, and whose they are.

        Args:
            batch: Its requests and query starts are read, its `token_request` is
                written.
            positions: Integers ``[>= T]``.
            out: int64 ``[1 + G, N]``, N >= T: the indexers' slot, then one for each
                stack; -1 behind the batch.
        """
        num_requests = batch.num_requests
        state_row = batch.state_row[:num_requests]
        query_start = batch.query_start[: num_requests + 1]
        token_request = batch.token_request[: out.shape[1]]
        if self.use_kernels:
            slot_mappings(
                positions,
                query_start,
                state_row,
                self.residency,
                out,
                token_request,
                block_size=self.block_size,
            )
            return
        out.fill_(PAD_SLOT)
        token_request.fill_(NO_ROW)
        lengths = query_start.diff()
        request = torch.arange(num_requests, dtype=torch.int32)
        request = torch.repeat_interleave(request, lengths)
        num_tokens = len(request)
        token_request[:num_tokens] = request
        pages = positions[:num_tokens] // self.block_size
        offsets = positions[:num_tokens] % self.block_size
        states = state_row[request.long()].long()
        # A page that is written has all its blocks (R3).
        frames = self.residency.page_frame[states, pages.long()].clamp(min=0)
        blocks = self.residency.frame_blocks[frames.long()].long()
        slots = blocks * self.block_size + offsets.unsqueeze(1)
        out[:, :num_tokens] = slots.masked_fill_(blocks == NULL_BLOCK, PAD_SLOT).T

    def indexer_table(self, batch: Batch, out: torch.Tensor) -> None:
        """Block table of the indexers, 0 where a page is not on the device.

        Args:
            batch: The step's requests.
            out: int32 ``[>= B, P]``; rows of the batch are written.
        """
        state_row = batch.state_row[: batch.num_requests]
        if self.use_kernels:
            gather_indexer_table(state_row, self.page_count, self.residency, out)
            return
        width = min(out.shape[1], self.residency.page_frame.shape[1])
        entries = self.residency.page_frame[state_row.long(), :width]
        blocks = self.residency.frame_blocks[_frame_of_entry(entries).long(), 0]
        out[: len(state_row)] = 0
        out[: len(state_row), :width] = blocks.masked_fill_(
            (state_row < 0).unsqueeze(1), NULL_BLOCK
        )

    def stack_table(self, batch: Batch, stack: int, out: torch.Tensor) -> None:
        """Block table of one stack, 0 where a page's latents are not on the device.

        For backends that gather the context of resident requests by block (D26).

        Args:
            batch: The step's requests.
            stack: 0..G-1.
            out: int32 ``[>= B, <= P]``; rows of the batch are written.
        """
        state_row = batch.state_row[: batch.num_requests].long()
        entries = self.residency.page_frame[state_row, : out.shape[1]]
        blocks = self.residency.frame_blocks[:, 1 + stack]
        table = blocks[entries.clamp(min=0).long()]
        is_there = (entries >= 0) & (state_row >= 0).unsqueeze(1)
        out[: len(state_row), : table.shape[1]] = table * is_there


def _frame_of_entry(entry: torch.Tensor) -> torch.Tensor:
    """Frame of each `page_frame` entry, latents there or not; 0 for none."""
    frame = torch.where(entry <= INDEXER_ONLY, INDEXER_ONLY - entry, entry)
    return frame.clamp_(min=0)
