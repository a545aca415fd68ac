# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Captured work: a CUDA graph, or on the CPU the launches that one would keep."""

from collections.abc import Callable
from typing import Protocol

import torch

from launch_recorder import LaunchRecorder


class Graph(Protocol):
    """Work that was captured once."""

    def replay(self) -> None:
        """Run the launches again, and no Python of the launchers."""


class CudaGraph:
    """A CUDA graph.

    Args:
        work: Only launches on the current stream and on streams forked from it.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        # A first run compiles the kernels, which a capture must not do.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            work()

    def replay(self) -> None:
        """See `Graph`."""
        self._graph.replay()


class RecordedGraph:
    """Launches with their arguments, as a graph keeps them.

    Operations of torch are not kept, so the work must have none; a replay that
    depends on one differs from the eager run.

    Args:
        work: See `CudaGraph`.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        work()
        with LaunchRecorder(run=True) as recorder:
            work()
        self._launches = recorder.launches

    def replay(self) -> None:
        """See `Graph`."""
        for launch in self._launches:
            launch.again()


def capture(device: torch.device, work: Callable[[], None]) -> Graph:
    """Capture work; it runs at least once here."""
    return RecordedGraph(work) if device.type == "cpu" else CudaGraph(work)
