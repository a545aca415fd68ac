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


def _no(transfer_id: int) -> bool:
    return False


class CpuCopies:
    """Copies with `memmove`.

    Attributes:
        delay_steps: Steps between the start of a copy and its completion.
        reorder: Order in which copies that are due complete, from their ids.
        fails: Whether a copy that is due fails, by its id.
        never: Whether a copy never completes, by its id.
        refuses: Whether copies to the device are refused; asked once for each batch.
    """

    def __init__(self) -> None:
        self._pending: dict[int, tuple[int, ByteRanges]] = {}
        self._step = 0
        self.delay_steps = 0
        self.reorder: Callable[[list[int]], list[int]] = list
        self.fails: Callable[[int], bool] = _no
        self.never: Callable[[int], bool] = _no
        self.refuses: Callable[[], bool] = lambda: False

    def start(self, transfer_ids: list[int], ranges: ByteRanges) -> None:
        """See `CopyEngine`."""
        due = self._step + self.delay_steps
        for transfer_id, own in zip(transfer_ids, ranges.split(len(transfer_ids))):
            self._pending[transfer_id] = (due, own)

    def run(self, ranges: ByteRanges) -> bool:
        """See `CopyEngine`."""
        if self.refuses():
            return False
        self._move(ranges)
        return True

    def _move(self, ranges: ByteRanges) -> None:
        for target, source, size in zip(
            ranges.targets.tolist(), ranges.sources.tolist(), ranges.sizes.tolist()
        ):
            ctypes.memmove(target, source, size)

    def poll(self) -> tuple[list[int], list[int]]:
        """See `CopyEngine`."""
        due = [t for t, (step, _) in self._pending.items() if step <= self._step]
        due = [t for t in due if not self.never(t)]
        self._step += 1
        done, failed = [], []
        for transfer_id in self.reorder(due):
            _, ranges = self._pending.pop(transfer_id)
            if self.fails(transfer_id):
                failed.append(transfer_id)
            else:
                self._move(ranges)
                done.append(transfer_id)
        return done, failed

    @property
    def num_pending(self) -> int:
        """See `CopyEngine`."""
        return len(self._pending)

    def shutdown(self) -> None:
        """See `CopyEngine`."""
