# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Times of work in a CUDA graph; on the CPU the same steps, with meaningless times."""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
from cuda_graph import CudaGraph  # noqa: E402

Work = Callable[[], None]

# More than the L2 cache of any GPU of today.
_FLUSH_BYTES = 256 << 20


def nothing() -> None:
    """Nothing to be put back between two replays."""


class Timer:
    """Measures work by replaying a graph of it.

    Args:
        device: Where the work runs.
        replays: Measured replays; the median of them counts.
        flush: Whether the L2 cache is overwritten before each.
    """

    def __init__(self, device: torch.device, replays: int, flush: bool) -> None:
        self._device, self._replays = device, replays
        self._is_cuda = device.type == "cuda"
        self._other: torch.Tensor | None = None
        if flush and self._is_cuda:
            self._other = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def measure(
        self, work: Work, restore: Work = nothing, captured: bool = True
    ) -> float:
        """Median time of a replay in µs.

        Args:
            work: Captured once: see `CudaGraph`.
            restore: Called before each replay, and not measured.
            captured: False for work that is long beside a launch: it runs as it is.
        """
        restore()
        run = CudaGraph(work).replay if captured and self._is_cuda else work
        times = []
        for _ in range(self._replays):
            restore()
            if self._other is not None:
                self._other.fill_(1)
            times.append(self._time(run))
        return statistics.median(times)

    def _time(self, run: Work) -> float:
        if not self._is_cuda:
            start = time.perf_counter()
            run()
            return 1e6 * (time.perf_counter() - start)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        return 1e3 * first.elapsed_time(last)
