# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Captured work: a CUDA graph, or on the CPU the launches that one would keep."""

from collections.abc import Callable
from typing import Protocol

import torch

from cuda_graph import CudaGraph
from launch_recorder import LaunchRecorder


class Graph(Protocol):
    """Work that was captured once."""

    def replay(self) -> None:
        """Run the launches again, and no Python of the launchers."""


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
