# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Page copies between device and host, on the CPU platform (D29).

"Device" and "host" are two CPU tensors here. Completions are real and may be late
and out of order: a test sets `delay_steps` and `reorder`. A write-back moves its
bytes when it completes, not when it is asked for, so that a frame that is given
away too early shows.
"""

from collections.abc import Callable, Iterator

import torch

from ..layout import DevicePlan
from ..messages import PageCopy
from ..pool import NULL_BLOCK
from .host_pool import HostPool


class PageCopier:
    """Copies pages of one rank.

    Args:
        plan: Geometry.
        slab: uint8 ``[num_blocks, block_bytes]``, the device pool.
        host: The host pool.

    Attributes:
        delay_steps: Steps between asking for a write-back and its completion.
        reorder: Order in which write-backs that are due complete, from their ids.
    """

    def __init__(self, plan: DevicePlan, slab: torch.Tensor, host: HostPool) -> None:
        self._plan, self._slab, self._host = plan, slab, host
        self._pending: dict[int, tuple[int, PageCopy]] = {}
        self._step = 0
        self.delay_steps = 0
        self.reorder: Callable[[list[int]], list[int]] = list
        self._restored_bytes = self._written_bytes = 0

    def write_back(self, copies: list[PageCopy]) -> None:
        """Start to copy pages to the host."""
        for copy in copies:
            self._pending[copy.transfer_id] = (self._step + self.delay_steps, copy)

    def restore(self, copies: list[PageCopy]) -> None:
        """Copy pages, or parts of them, to the device; complete on return."""
        for copy in copies:
            for host_pages, device_pages, block in self._parts(copy):
                device_pages[block] = host_pages[copy.page_id]
                self._restored_bytes += host_pages.shape[1]

    def poll(self) -> list[int]:
        """Write-backs that completed since the last call; one call is one step."""
        due = [t for t, (step, _) in self._pending.items() if step <= self._step]
        self._step += 1
        for transfer_id in self.reorder(due):
            _, copy = self._pending.pop(transfer_id)
            for host_pages, device_pages, block in self._parts(copy):
                host_pages[copy.page_id] = device_pages[block]
                self._written_bytes += host_pages.shape[1]
        return due

    def take_bytes(self) -> tuple[int, int]:
        """Bytes restored and written back since the last call."""
        taken = self._restored_bytes, self._written_bytes
        self._restored_bytes = self._written_bytes = 0
        return taken

    @property
    def num_pending(self) -> int:
        """Write-backs that have not completed."""
        return len(self._pending)

    def _parts(
        self, copy: PageCopy
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """A layer's host pages, its pages in the slab, and the block to copy."""
        plan = self._plan
        if copy.indexer_block != NULL_BLOCK:
            for indexer in plan.indexers:
                device_pages = self._pages(indexer.byte_offset, plan.indexer_page_bytes)
                yield self._host.layers[indexer.name], device_pages, copy.indexer_block
        if copy.latent_blocks:
            for latent in plan.latents:
                device_pages = self._pages(latent.byte_offset, plan.latent_page_bytes)
                block = copy.latent_blocks[latent.stack]
                yield self._host.layers[latent.name], device_pages, block

    def _pages(self, byte_offset: int, page_bytes: int) -> torch.Tensor:
        return self._slab[:, byte_offset : byte_offset + page_bytes]
