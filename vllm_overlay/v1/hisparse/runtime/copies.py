# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Page copies between device and host, in batches of plain byte ranges."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..layout import DevicePlan
from ..messages import PageCopy
from ..pool import NULL_BLOCK
from .host_pool import HostPool


@dataclass(frozen=True)
class ByteRanges:
    """Copies of one batch; int64 arrays of the same length.

    Attributes:
        transfer_ids: Transfers they belong to.
        sources: Addresses to read from.
        targets: Addresses to write to.
        sizes: Bytes.
    """

    transfer_ids: np.ndarray
    sources: np.ndarray
    targets: np.ndarray
    sizes: np.ndarray

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole batch."""
        return int(self.sizes.sum())

    def by_transfer(self) -> dict[int, "ByteRanges"]:
        """The ranges of each transfer; those of one are neighbours."""
        _, starts = np.unique(self.transfer_ids, return_index=True)
        cuts = np.sort(starts)
        arrays = (self.transfer_ids, self.sources, self.targets, self.sizes)
        parts = zip(*(np.split(array, cuts[1:]) for array in arrays), strict=True)
        return {int(part[0][0]): ByteRanges(*part) for part in parts}

    def reversed(self) -> "ByteRanges":
        """The same ranges, copied the other way."""
        return ByteRanges(self.transfer_ids, self.targets, self.sources, self.sizes)


class CopyQueue(Protocol):
    """Copies bytes one way; see `cpu_copies` and `stream_copies`."""

    def start(self, ranges: ByteRanges) -> None:
        """Begin copies that come after all that was launched on the device."""

    def poll(self) -> tuple[list[int], list[int]]:
        """Transfers that completed, and that failed, since the last call.

        Nothing of them is under way any more. One call is one step.
        """

    @property
    def num_pending(self) -> int:
        """Transfers that have not ended."""

    def shutdown(self) -> None:
        """Wait for what is under way."""


class PageCopier:
    """Copies pages of one rank.

    Args:
        plan: Geometry.
        slab: uint8 ``[num_blocks, block_bytes]``, the device pool.
        host: The host pool.
        to_host: Writes pages back.
        to_device: Restores them. Another queue, for a write-back that does not end
            must hold nobody up who waits for a restore.
    """

    def __init__(
        self,
        plan: DevicePlan,
        slab: torch.Tensor,
        host: HostPool,
        to_host: CopyQueue,
        to_device: CopyQueue,
    ) -> None:
        self.to_host, self.to_device = to_host, to_device
        self._slab_address, self._block_bytes = slab.data_ptr(), plan.block_bytes
        layers = [(0, p.byte_offset, p.name) for p in plan.indexers]
        layers += [(1 + p.stack, p.byte_offset, p.name) for p in plan.latents]
        columns, offsets, names = zip(*layers)
        # Block of a frame in which a layer lies; column 0 is the indexers' block.
        self._column = np.array(columns)
        self._offset = np.array(offsets, dtype=np.int64)
        pages = [host.layers[name] for name in names]
        self._host_address = np.array([p.data_ptr() for p in pages], dtype=np.int64)
        self._page_bytes = np.array([p.shape[1] for p in pages], dtype=np.int64)
        self._is_own = np.array([name in host.own_layers for name in names])
        self._ended: list[int] = []
        self._frame_blocks = plan.frame_blocks
        self._restored_bytes = self._written_bytes = 0

    def write_back(self, copies: list[PageCopy]) -> None:
        """Start to copy this rank's part of pages to the host (D19)."""
        if not self._is_own.any():
            self._ended += [copy.transfer_id for copy in copies]
        elif copies:
            ranges = self._device_to_host(copies, self._is_own)
            self.to_host.start(ranges)
            self._written_bytes += ranges.num_bytes

    def restore(self, copies: list[PageCopy]) -> None:
        """Start to copy pages, or parts of them, to the device."""
        if copies:
            ranges = self._device_to_host(copies, np.ones_like(self._is_own)).reversed()
            self.to_device.start(ranges)
            self._restored_bytes += ranges.num_bytes

    def poll(self) -> tuple[list[int], list[int]]:
        """Transfers that completed, and that failed, since the last call."""
        ended, self._ended = self._ended, []
        written, restored = self.to_host.poll(), self.to_device.poll()
        return ended + written[0] + restored[0], written[1] + restored[1]

    def take_bytes(self) -> tuple[int, int]:
        """Bytes restored and written back since the last call."""
        taken = self._restored_bytes, self._written_bytes
        self._restored_bytes = self._written_bytes = 0
        return taken

    def shutdown(self) -> None:
        """Wait for what is under way."""
        self.to_host.shutdown()
        self.to_device.shutdown()

    def _device_to_host(
        self, copies: Sequence[PageCopy], layers: np.ndarray
    ) -> ByteRanges:
        """Ranges of pages, or parts of them, from their blocks to their host pages.

        Args:
            copies: The pages.
            layers: bool, the layers to copy of them.
        """
        blocks = np.full((len(copies), self._frame_blocks), NULL_BLOCK, dtype=np.int64)
        for row, copy in zip(blocks, copies):
            row[0] = copy.indexer_block
            if copy.latent_blocks:
                row[1:] = copy.latent_blocks
        by_layer = blocks[:, self._column]
        device = self._slab_address + by_layer * self._block_bytes + self._offset
        page_ids = np.array([copy.page_id for copy in copies], dtype=np.int64)
        host = self._host_address + page_ids[:, None] * self._page_bytes
        sizes = np.broadcast_to(self._page_bytes, device.shape)
        ids = np.array([copy.transfer_id for copy in copies], dtype=np.int64)
        ids = np.broadcast_to(ids[:, None], device.shape)
        there = (by_layer != NULL_BLOCK) & layers
        return ByteRanges(ids[there], device[there], host[there], sizes[there])
