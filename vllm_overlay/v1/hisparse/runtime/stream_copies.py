# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The copy engine of GPUs: batched copies on streams of their own (R5).

Copies wait for what the compute stream was given before, in both directions: a
write-back reads what earlier steps wrote, a restore writes blocks that they may read.
The compute stream waits for restores; completed write-backs are found by their events.
Restores have another stream than write-backs: the forward waits for them, and so it
would for write-backs of earlier steps, of which one may never end.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from .copies import ByteRanges

# Copies addresses to addresses on the current stream; all int64 on the CPU.
CopyBatch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class StreamCopies:
    """Copies on side streams.

    Args:
        device: The GPU.
        copy_batch: Submits a batch on the current stream.
    """

    def __init__(self, device: torch.device, copy_batch: CopyBatch) -> None:
        self._to_host, self._to_device = (torch.cuda.Stream(device) for _ in range(2))
        self._copy_batch = copy_batch
        self._pending: deque[tuple[list[int], torch.cuda.Event, tuple]] = deque()
        # Nobody asks for a restore, but its arguments must live as long.
        self._restores: deque[tuple[torch.cuda.Event, tuple]] = deque()
        self._failed: list[int] = []

    def start(self, transfer_ids: list[int], ranges: ByteRanges) -> None:
        """See `CopyEngine`."""
        event, arguments, is_accepted = self._submit(self._to_host, ranges)
        if is_accepted:
            self._pending.append((list(transfer_ids), event, arguments))
        else:
            self._failed += transfer_ids

    def run(self, ranges: ByteRanges) -> bool:
        """See `CopyEngine`."""
        event, arguments, is_accepted = self._submit(self._to_device, ranges)
        torch.cuda.current_stream().wait_event(event)
        self._restores.append((event, arguments))
        return is_accepted

    def _submit(
        self, stream: torch.cuda.Stream, ranges: ByteRanges
    ) -> tuple[torch.cuda.Event, tuple, bool]:
        """Give a batch to a stream.

        Returns:
            An event behind it, what must live until then, and whether the batch was
            accepted. A broken device fails elsewhere too.
        """
        arguments = tuple(
            torch.from_numpy(np.ascontiguousarray(array))
            for array in (ranges.sources, ranges.targets, ranges.sizes)
        )
        event = torch.cuda.Event()
        is_accepted = True
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            try:
                self._copy_batch(*arguments)
            except RuntimeError:
                # The first copies of a batch may have been accepted.
                is_accepted = False
            event.record(stream)
        return event, arguments, is_accepted

    def poll(self) -> tuple[list[int], list[int]]:
        """See `CopyEngine`."""
        done: list[int] = []
        while self._pending and self._pending[0][1].query():
            done += self._pending.popleft()[0]
        while self._restores and self._restores[0][0].query():
            self._restores.popleft()
        failed, self._failed = self._failed, []
        return done, failed

    @property
    def num_pending(self) -> int:
        """See `CopyEngine`."""
        return sum(len(transfer_ids) for transfer_ids, _, _ in self._pending)

    def shutdown(self) -> None:
        """See `CopyEngine`."""
        self._to_host.synchronize()
        self._to_device.synchronize()
