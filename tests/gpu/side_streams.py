# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Side streams that are always late, so that a missing order shows.

On the CPU nothing runs beside anything: work that a stream would do later is put off
until it is joined, and copies are moved when they are polled.
"""

import ctypes
import time
from collections.abc import Callable

import pytest
import torch
from vllm.v1.hisparse.runtime.ahead import Ahead, SideStream
from vllm.v1.hisparse.runtime.copies import CopyQueue
from vllm.v1.hisparse.runtime.cpu_copies import CpuCopies
from vllm.v1.hisparse.runtime.stream_copies import CopyBatch, StreamCopies

# A millisecond at 2 GHz: what is ordered only by luck comes long before or after it.
DELAY_CYCLES = 2_000_000
_DEFAULT_KIND = 4  # cudaMemcpyDefault: the driver knows where an address is


def delay(device: torch.device, times: int = 1) -> None:
    """Keep the current stream busy for a while."""
    if device.type == "cuda":
        torch.cuda._sleep(times * DELAY_CYCLES)


class Postponed:
    """Runs a piece only when it is joined, as a very late stream would."""

    def __init__(self) -> None:
        self._pieces: list[Callable[[], None]] = []

    def start(self, pieces: list[Callable[[], None]]) -> None:
        """See `Ahead`."""
        self._pieces = list(pieces)
        self._next = 0

    def join(self, number: int) -> None:
        """See `Ahead`."""
        for piece in self._pieces[self._next : number + 1]:
            piece()
        self._next = max(self._next, number + 1)


class LateStream(SideStream):
    """A side stream on which every piece begins late."""

    def start(self, pieces: list[Callable[[], None]]) -> None:
        """See `Ahead`."""

        def late(piece: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                delay(torch.device("cuda"))
                piece()

            return run

        super().start([late(piece) for piece in pieces])


def late_ahead(device: torch.device, most: int = 8) -> Ahead:
    """What fetches ahead, as late as it may."""
    if device.type == "cpu":
        return Postponed()
    return LateStream(torch.cuda.Stream(device), most)


def late_copies(device: torch.device) -> CopyQueue:
    """Copies of the device that begin late."""
    if device.type == "cpu":
        queue = CpuCopies()
        queue.delay_steps = 2
        return queue
    copy_batch = _copy_batch()

    def late(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
        delay(device)
        copy_batch(sources, targets, sizes)

    return StreamCopies(device, late)


def wait_for(queue: CopyQueue, count: int) -> list[int]:
    """Poll until so many copies have completed."""
    done: list[int] = []
    stop = time.monotonic() + 30
    while len(done) < count:
        assert time.monotonic() < stop, f"{len(done)} of {count} copies in 30 s"
        done += queue.poll()[0]
    return done


def _copy_batch() -> CopyBatch:
    """vLLM's batched copy, or the CUDA runtime's where vLLM is not there."""
    try:
        from vllm import _custom_ops
    except ImportError:
        return _runtime_copies()
    return _custom_ops.swap_blocks_batch


def _runtime_copies() -> CopyBatch:
    with open("/proc/self/maps") as maps:
        names = [line.split()[-1] for line in maps if "libcudart" in line]
    if not names:
        pytest.skip("neither vLLM nor a loaded libcudart copies in batches")
    library = ctypes.CDLL(names[0])

    def copy(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        for source, target, size in zip(
            sources.tolist(), targets.tolist(), sizes.tolist()
        ):
            error = library.cudaMemcpyAsync(
                ctypes.c_void_p(target), ctypes.c_void_p(source),
                ctypes.c_size_t(size), _DEFAULT_KIND, stream,
            )  # fmt: skip
            if error:
                raise RuntimeError(f"cudaMemcpyAsync: error {error}")

    return copy
