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
        sources: Addresses to read from.
        targets: Addresses to write to.
        sizes: Bytes.
    """

    sources: np.ndarray
    targets: np.ndarray
    sizes: np.ndarray

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole batch."""
        return int(self.sizes.sum())

    def split(self, count: int) -> list["ByteRanges"]:
        """Cut into so many batches of the same length."""
        arrays = (self.sources, self.targets, self.sizes)
        return [ByteRanges(*p) for p in zip(*(np.split(a, count) for a in arrays))]

    def reversed(self) -> "ByteRanges":
        """The same ranges, copied the other way."""
        return ByteRanges(self.targets, self.sources, self.sizes)


class CopyEngine(Protocol):
    """Moves bytes; see `cpu_copies` and `stream_copies`."""

    def start(self, transfer_ids: list[int], ranges: ByteRanges) -> None:
        """Begin copies that read what earlier steps wrote on the device.

        Args:
            transfer_ids: Names of the copies.
            ranges: Byte ranges of all of them, in their order, as many for each.
        """

    def run(self, ranges: ByteRanges) -> bool:
        """Copy to the device, before anything that is launched after this call.

        Returns:
            Whether all of it was accepted. If not, a part may have been: it is over
            before anything that is launched after this call, too.
        """

    def poll(self) -> tuple[list[int], list[int]]:
        """Copies that completed, and that failed, since the last call.

        One call is one step.
        """

    @property
    def num_pending(self) -> int:
        """Copies that have not completed."""

    def shutdown(self) -> None:
        """Wait for what is under way."""


class PageCopier:
    """Copies pages of one rank.

    Args:
        plan: Geometry.
        slab: uint8 ``[num_blocks, block_bytes]``, the device pool.
        host: The host pool.
        engine: Moves the bytes.
    """

    def __init__(
        self,
        plan: DevicePlan,
        slab: torch.Tensor,
        host: HostPool,
        engine: CopyEngine,
    ) -> None:
        self.engine = engine
        self._slab = slab
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
        self._frame_blocks = plan.frame_blocks
        self._restored_bytes = self._written_bytes = 0
        self._not_restored: set[int] = set()

    def write_back(self, copies: list[PageCopy]) -> None:
        """Start to copy pages to the host."""
        if not copies:
            return
        ranges = self._device_to_host(copies)
        self.engine.start([copy.transfer_id for copy in copies], ranges)
        self._written_bytes += ranges.num_bytes

    def restore(self, copies: list[PageCopy]) -> None:
        """Copy pages, or parts of them, to the device before the step's forward.

        If that fails, their blocks hold zeros: what others left there need not be
        numbers in the format of these layers, and other requests of the step must not
        suffer.
        """
        if not copies:
            return
        ranges = self._device_to_host(copies).reversed()
        if self.engine.run(ranges):
            self._restored_bytes += ranges.num_bytes
            return
        self._not_restored.update(copy.page_id for copy in copies)
        blocks = [b for c in copies for b in (c.indexer_block, *c.latent_blocks) if b]
        self._slab[torch.tensor(blocks, device=self._slab.device)] = 0

    def take_not_restored(self) -> set[int]:
        """Pages whose restore failed since the last call."""
        taken, self._not_restored = self._not_restored, set()
        return taken

    def poll(self) -> tuple[list[int], list[int]]:
        """Write-backs that completed, and that failed, since the last call."""
        return self.engine.poll()

    def take_bytes(self) -> tuple[int, int]:
        """Bytes restored and written back since the last call."""
        taken = self._restored_bytes, self._written_bytes
        self._restored_bytes = self._written_bytes = 0
        return taken

    @property
    def num_pending(self) -> int:
        """Write-backs that have not completed."""
        return self.engine.num_pending

    def _device_to_host(self, copies: Sequence[PageCopy]) -> ByteRanges:
        """Ranges of pages, or parts of them, from their blocks to their host pages."""
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
        there = by_layer != NULL_BLOCK
        return ByteRanges(device[there], host[there], sizes[there])
