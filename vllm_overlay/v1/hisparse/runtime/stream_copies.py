# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The copy engine of GPUs: batched copies on a stream of its own (R5).

Copies wait for what the compute stream was given before, in both directions: a
write-back reads what earlier steps wrote, a restore writes blocks that they may read.
The compute stream waits for restores; completed write-backs are found by their events.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from .copies import ByteRanges

# Copies addresses to addresses on the current stream; all int64 on the CPU.
CopyBatch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class StreamCopies:
    """Copies on a side stream.

    Args:
        device: The GPU.
        copy_batch: Submits a batch on the current stream.
    """

    def __init__(self, device: torch.device, copy_batch: CopyBatch) -> None:
        self._stream = torch.cuda.Stream(device)
        self._copy_batch = copy_batch
        self._pending: deque[tuple[list[int], torch.cuda.Event, tuple]] = deque()
        self._failed: list[int] = []

    def start(self, transfer_ids: list[int], ranges: ByteRanges) -> None:
        """See `CopyEngine`."""
        try:
            event, arguments = self._submit(ranges)
        except RuntimeError:
            # Not accepted: nothing of it runs. A broken device fails elsewhere too.
            self._failed += transfer_ids
            return
        self._pending.append((list(transfer_ids), event, arguments))

    def run(self, ranges: ByteRanges) -> None:
        """See `CopyEngine`."""
        event, arguments = self._submit(ranges)
        torch.cuda.current_stream().wait_event(event)
        # Nobody waits for it by name, but its arguments must live as long.
        self._pending.append(([], event, arguments))

    def _submit(self, ranges: ByteRanges) -> tuple[torch.cuda.Event, tuple]:
        arguments = tuple(
            torch.from_numpy(np.ascontiguousarray(array))
            for array in (ranges.sources, ranges.targets, ranges.sizes)
        )
        event = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy_batch(*arguments)
            event.record(self._stream)
        return event, arguments

    def poll(self) -> tuple[list[int], list[int]]:
        """See `CopyEngine`."""
        done: list[int] = []
        while self._pending and self._pending[0][1].query():
            done += self._pending.popleft()[0]
        failed, self._failed = self._failed, []
        return done, failed

    @property
    def num_pending(self) -> int:
        """See `CopyEngine`."""
        return sum(len(transfer_ids) for transfer_ids, _, _ in self._pending)

    def shutdown(self) -> None:
        """See `CopyEngine`."""
        self._stream.synchronize()
