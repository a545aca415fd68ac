# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The copies of GPUs: batched, on a stream of their own (R5).

Copies wait for what the compute stream was given before, in both directions: a
write-back reads what earlier steps wrote, a restore writes blocks that they may read.
The compute stream waits for neither: events say when they have ended.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

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
        self._pending: deque[_Batch] = deque()

    def start(self, ranges: ByteRanges) -> None:
        """See `CopyQueue`. A batch that is not accepted fails."""
        arguments = tuple(
            torch.from_numpy(np.ascontiguousarray(array))
            for array in (ranges.sources, ranges.targets, ranges.sizes)
        )
        event = torch.cuda.Event()
        is_accepted = True
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            try:
                self._copy_batch(*arguments)
            except RuntimeError:
                # The first copies of it may be under way. A broken device fails
                # elsewhere too.
                is_accepted = False
            event.record(self._stream)
        transfer_ids = np.unique(ranges.transfer_ids).tolist()
        self._pending.append(_Batch(transfer_ids, event, arguments, is_accepted))

    def poll(self) -> tuple[list[int], list[int]]:
        """See `CopyQueue`."""
        done: list[int] = []
        failed: list[int] = []
        while self._pending and self._pending[0].event.query():
            batch = self._pending.popleft()
            (done if batch.is_accepted else failed).extend(batch.transfer_ids)
        return done, failed

    @property
    def num_pending(self) -> int:
        """See `CopyQueue`."""
        return sum(len(batch.transfer_ids) for batch in self._pending)

    def shutdown(self) -> None:
        """See `CopyQueue`."""
        self._stream.synchronize()


@dataclass
class _Batch:
    """Copies that end together.

    Attributes:
        transfer_ids: The transfers.
        event: Behind all copies of the batch.
        arguments: Must live until then.
        is_accepted: Whether all copies were submitted.
    """

    transfer_ids: list[int]
    event: torch.cuda.Event
    arguments: tuple[torch.Tensor, ...]
    is_accepted: bool
