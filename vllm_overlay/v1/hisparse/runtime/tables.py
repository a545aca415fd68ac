# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Residency on the device, by state row (D18), and what is derived from it."""

import torch

from ..capacity import PoolPlan
from ..kernels.reset import reset_rows
from ..kernels.tensors import HotBlocks, HotUnit, Residency, new_hot_state
from ..messages import INDEXER_ONLY, NO_FRAME, HotLease, StepUpdate
from ..pool import NULL_BLOCK

PAD_SLOT = -1
NO_ROW = -1


def _frame_of_entry(entry: torch.Tensor) -> torch.Tensor:
    """Frame of each `page_frame` entry, latents there or not; 0 for none."""
    frame = torch.where(entry <= INDEXER_ONLY, INDEXER_ONLY - entry, entry)
    return frame.clamp_(min=0)


class ResidencyTables:
    """Tables of frames, leases and hot rows; one for all layers.

    Attributes:
        residency: Page tables, see `kernels.tensors.Residency`.
        hot: Blocks of the leases.
        units: LRU state of each index unit.
    """

    def __init__(
        self, plan: PoolPlan, num_state_rows: int, device: torch.device | str
    ) -> None:
        self.plan = plan
        self.block_size = plan.device.block_size
        num_pages = plan.pages(plan.limits.max_model_len) + 1
        int32 = {"dtype": torch.int32, "device": device}
        frame_width = plan.device.frame_blocks
        self.residency = Residency(
            page_frame=torch.full((num_state_rows, num_pages), NO_FRAME, **int32),
            frame_blocks=torch.zeros((plan.max_frames, frame_width), **int32),
            mixed_row=torch.full((num_state_rows,), NO_ROW, **int32),
        )
        num_rows = plan.mixed_rows
        stacks, hot_blocks = plan.device.num_stacks, plan.hot_blocks
        self.hot = HotBlocks(
            hot_blocks=torch.zeros((num_rows, stacks, hot_blocks), **int32),
            overflow_blocks=torch.zeros((num_rows, plan.overflow_blocks), **int32),
        )
        self._hot_state = new_hot_state(
            len(plan.device.units),
            num_rows,
            plan.hot.hot_rows,
            num_pages * self.block_size,
            device,
        )
        self.units = [HotUnit(*state) for state in zip(*self._hot_state)]

    def apply(self, update: StepUpdate, state_rows: dict[str, int]) -> None:
        """Apply a step's changes.

        Args:
            update: From the scheduler.
            state_rows: State row of each request on this worker.
        """
        if update.frames:
            ids = torch.tensor(list(update.frames))
            blocks = torch.tensor(list(update.frames.values()), dtype=torch.int32)
            self.residency.frame_blocks[ids] = blocks
        granted = []
        for request_id, change in update.requests.items():
            row = state_rows[request_id]
            page_frame = self.residency.page_frame[row]
            if change.start == 0:
                page_frame.fill_(NO_FRAME)
                self.residency.mixed_row[row] = NO_ROW
            if change.changed:
                pages = torch.tensor(list(change.changed))
                entries = torch.tensor(list(change.changed.values()), dtype=torch.int32)
                page_frame[pages] = entries
            end = change.start + len(change.entries)
            entries = torch.tensor(change.entries, dtype=torch.int32)
            page_frame[change.start : end] = entries
            if change.lease is not None:
                self._grant(row, change.lease)
                granted.append(change.lease.row)
        if granted:
            reset_rows(torch.tensor(granted, dtype=torch.int32), *self._hot_state)

    def _grant(self, state_row: int, lease: HotLease) -> None:
        self.residency.mixed_row[state_row] = lease.row
        num_hot = self.hot.hot_blocks[lease.row].numel()
        blocks = torch.tensor(lease.blocks, dtype=torch.int32)
        hot_blocks = self.hot.hot_blocks[lease.row]
        hot_blocks.copy_(blocks[:num_hot].view_as(hot_blocks))
        self.hot.overflow_blocks[lease.row] = blocks[num_hot:]

    def frames_of(self, state_row: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Frame of each page, whether its latents are there or not; 0 for none.

        Args:
            state_row: Long, any shape.
            pages: Long, the same shape.
        """
        return _frame_of_entry(self.residency.page_frame[state_row, pages])

    def slots(
        self, state_row: torch.Tensor, positions: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Where tokens are written: the indexers' slot, then one for each stack.

        Args:
            state_row: Long ``[T]``.
            positions: Long ``[T]``.
            out: int64 ``[1 + G, >= T]``; written for T tokens.
        """
        pages, offsets = positions // self.block_size, positions % self.block_size
        frames = self.frames_of(state_row, pages)
        blocks = self.residency.frame_blocks[frames.long()].long()
        slots = blocks * self.block_size + offsets.unsqueeze(1)
        slots = slots.masked_fill_(blocks == NULL_BLOCK, PAD_SLOT)
        out[:, : len(positions)] = slots.T

    def indexer_table(self, state_row: torch.Tensor, out: torch.Tensor) -> None:
        """Block table of the indexers.

        Args:
            state_row: Long ``[B]``.
            out: int32 ``[>= B, P]``; rows of the batch are written, 0 where a page
                is not on the device.
        """
        width = min(out.shape[1], self.residency.page_frame.shape[1])
        frames = _frame_of_entry(self.residency.page_frame[state_row, :width])
        blocks = self.residency.frame_blocks[frames.long(), 0]
        out[: len(state_row), :width] = blocks
