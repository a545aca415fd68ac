# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The copy engine of the CPU platform, where device and host are both memory (D29).

Completions are real and may be late and out of order: a test sets `delay_steps` and
`reorder`. A copy moves its bytes when it completes, not when it is asked for, so that
a frame that is given away too early shows.
"""

import ctypes
from collections.abc import Callable

from .copies import ByteRanges


class CpuCopies:
    """Copies with `memmove`.

    Attributes:
        delay_steps: Steps between the start of a copy and its completion.
        reorder: Order in which copies that are due complete, from their ids.
    """

    def __init__(self) -> None:
        self._pending: dict[int, tuple[int, ByteRanges]] = {}
        self._step = 0
        self.delay_steps = 0
        self.reorder: Callable[[list[int]], list[int]] = list

    def start(self, transfer_ids: list[int], ranges: list[ByteRanges]) -> None:
        """See `CopyEngine`."""
        due = self._step + self.delay_steps
        for transfer_id, own in zip(transfer_ids, ranges, strict=True):
            self._pending[transfer_id] = (due, own)

    def run(self, ranges: ByteRanges) -> None:
        """See `CopyEngine`."""
        for target, source, size in zip(
            ranges.targets.tolist(), ranges.sources.tolist(), ranges.sizes.tolist()
        ):
            ctypes.memmove(target, source, size)

    def poll(self) -> list[int]:
        """See `CopyEngine`."""
        due = [t for t, (step, _) in self._pending.items() if step <= self._step]
        self._step += 1
        for transfer_id in self.reorder(due):
            self.run(self._pending.pop(transfer_id)[1])
        return due

    @property
    def num_pending(self) -> int:
        """See `CopyEngine`."""
        return len(self._pending)

    def shutdown(self) -> None:
        """See `CopyEngine`."""
