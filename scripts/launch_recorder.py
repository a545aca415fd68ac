# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Records the launches of Triton kernels, compiled or interpreted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from triton.runtime.jit import KernelInterface


@dataclass(frozen=True)
class RecordedLaunch:
    """One launch, as a launcher made it.

    Attributes:
        kernel: What was launched.
        grid: Programs along each axis.
        args: Arguments by place.
        sizes: Arguments by name, and options such as ``num_warps``.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    sizes: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return self.kernel.__name__

    def again(self) -> None:
        """Launch it again, with the same arguments."""
        self.kernel[self.grid](*self.args, **self.sizes)


class LaunchRecorder:
    """Context manager that records the launches within it.

    Args:
        run: Whether they also run.

    Attributes:
        launches: In their order.
    """

    def __init__(self, run: bool) -> None:
        self.launches: list[RecordedLaunch] = []
        self._run = run

    def note(self, launch: RecordedLaunch) -> None:
        """Keep a launch."""
        self.launches.append(launch)

    def __enter__(self) -> LaunchRecorder:
        self._original = original = KernelInterface.__getitem__

        def getitem(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **sizes: Any) -> None:
                self.note(RecordedLaunch(kernel, grid, args, sizes))
                if self._run:
                    original(kernel, grid)(*args, **sizes)

            return launch

        KernelInterface.__getitem__ = getitem
        return self

    def __exit__(self, *_: object) -> None:
        KernelInterface.__getitem__ = self._original
