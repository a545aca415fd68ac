# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Captures work in a CUDA graph, for the tests on a GPU and the kernels' benchmark."""

from __future__ import annotations

from collections.abc import Callable

import torch


class CudaGraph:
    """A CUDA graph of work, which also runs once before it is captured.

    Args:
        work: Only launches on the current stream and on streams forked from it, over
            tensors that stay.
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
        """Run the launches again, and no Python of the launchers."""
        self._graph.replay()
