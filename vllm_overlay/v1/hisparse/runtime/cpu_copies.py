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
    """Copies one way, with `memmove`.

    Attributes:
        delay_steps: Steps between the start of a copy and its completion.
        reorder: Order in which copies that are due complete, from their ids.
        fails: Whether a copy that is due fails, by its id.
        never: Whether a copy never ends, by its id.
    """

    def __init__(self) -> None:
        self._pending: dict[int, tuple[int, ByteRanges]] = {}
        self._step = 0
        self.delay_steps = 0
        self.reorder: Callable[[list[int]], list[int]] = list
        self.fails: Callable[[int], bool] = _no
        self.never: Callable[[int], bool] = _no

    def start(self, ranges: ByteRanges) -> None:
        """See `CopyQueue`."""
        due = self._step + self.delay_steps
        for transfer_id, own in ranges.by_transfer().items():
            self._pending[transfer_id] = (due, own)

    def poll(self) -> tuple[list[int], list[int]]:
        """See `CopyQueue`."""
        due = [t for t, (step, _) in self._pending.items() if step <= self._step]
        due = [t for t in due if not self.never(t)]
        self._step += 1
        done, failed = [], []
        for transfer_id in self.reorder(due):
            _, ranges = self._pending.pop(transfer_id)
            if self.fails(transfer_id):
                failed.append(transfer_id)
            else:
                _move(ranges)
                done.append(transfer_id)
        return done, failed

    @property
    def num_pending(self) -> int:
        """See `CopyQueue`."""
        return len(self._pending)

    def shutdown(self) -> None:
        """See `CopyQueue`."""


def _move(ranges: ByteRanges) -> None:
    for target, source, size in zip(
        ranges.targets.tolist(), ranges.sources.tolist(), ranges.sizes.tolist()
    ):
        ctypes.memmove(target, source, size)
