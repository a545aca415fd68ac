# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The host pool: one dense tensor of pages for each layer (D6)."""

import ctypes
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import accumulate
from typing import Protocol

import torch

from ..layout import DevicePlan
from ..settings import GIB
from .shared_memory import ONE_RANK, Sharers, raise_together, zeroed_memory

TOUCH_CHUNK_BYTES = 1 << 30


class Registrar(Protocol):
    """Pins memory for the device, see `CudaRegistrar`."""

    def pin(self, address: int, num_bytes: int) -> int:
        """Pin; returns 0, or the error's number."""

    def unpin(self, address: int) -> int:
        """Unpin; returns 0, or the error's number."""


class CudaRegistrar:
    """Pins with the CUDA runtime; the memory can be read by kernels then."""

    def pin(self, address: int, num_bytes: int) -> int:
        """See `Registrar`."""
        return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))

    def unpin(self, address: int) -> int:
        """See `Registrar`."""
        return int(torch.cuda.cudart().cudaHostUnregister(address))


class HostPool:
    """Pages of all layers in host memory, pinned where there is a GPU.

    Args:
        plan: Geometry.
        num_pages: Pages, the null page included.
        registrar: Pins the memory; None where device and host are the same.
        cpus: Processors near the device. Memory lies near the one that touches it
            first, so they touch it all, in parallel.
        progress: Called with the bytes touched so far and those that this rank touches.
        sharers: Ranks that make their pools together; those of a node have one.

    Attributes:
        buffer: uint8, the whole pool.
        layers: By layer name, uint8 ``[num_pages, page_bytes]`` views of `buffer`.
        own_layers: Names of the layers whose pages this rank writes back (D19).

    Raises:
        RuntimeError: the memory cannot be had or pinned; nothing is held then.
    """

    def __init__(
        self,
        plan: DevicePlan,
        num_pages: int,
        registrar: Registrar | None = None,
        cpus: Iterable[int] = (),
        progress: Callable[[int, int], None] = lambda done, total: None,
        sharers: Sharers = ONE_RANK,
    ) -> None:
        self._num_bytes = num_pages * plan.host_page_bytes
        memory = zeroed_memory(self._num_bytes, sharers)
        self.buffer = torch.frombuffer(memory, dtype=torch.uint8)
        self._registrar: Registrar | None = None
        offsets = (*plan.host_layer_offsets(num_pages), self._num_bytes)
        own = share([y.page_bytes for y in plan.host_layers], sharers)
        self.own_layers = frozenset(plan.host_layers[i].name for i in own)
        if registrar is not None:
            own_bytes = self.buffer[offsets[own.start] : offsets[own.stop]]
            error = ""
            try:
                touch(own_bytes, set(cpus), progress)
            except (OSError, RuntimeError) as failure:
                error = f"HiSparse: the host pool cannot be touched: {failure}"
            # All before one pins, which would touch everything.
            raise_together(sharers, error)
            self._pin(registrar)
        self.layers: dict[str, torch.Tensor] = {}
        for layer, start, end in zip(plan.host_layers, offsets, offsets[1:]):
            view = self.buffer[start:end]
            self.layers[layer.name] = view.view(num_pages, layer.page_bytes)

    def _pin(self, registrar: Registrar) -> None:
        error = registrar.pin(self.buffer.data_ptr(), self._num_bytes)
        if error:
            raise RuntimeError(
                f"HiSparse: host_pool_gib of {self._num_bytes / GIB:.2f} GiB cannot be "
                f"pinned (CUDA error {error}); allowed: what this process may lock in "
                "memory. Remedy: raise the limit (ulimit -l unlimited; in a container "
                "--ulimit memlock=-1), or make host_pool_gib smaller."
            )
        self._registrar = registrar

    def close(self) -> None:
        """Unpin the memory; safe to call twice."""
        if self._registrar is not None:
            self._registrar.unpin(self.buffer.data_ptr())
            self._registrar = None


def share(sizes: Sequence[int], sharers: Sharers) -> range:
    """Neighbouring layers whose pages a rank writes back: an even part of the bytes.

    Args:
        sizes: Bytes of each layer; it belongs to the rank in whose part its middle is.
        sharers: The ranks; those of this node share.
    """
    count, index = len(sharers.node), sharers.node.index(sharers.rank)
    ends = list(accumulate(sizes))
    middles = (end - size / 2 for end, size in zip(ends, sizes))
    owners = [int(middle * count / ends[-1]) for middle in middles]
    return range(bisect_left(owners, index), bisect_right(owners, index))


def touch(
    buffer: torch.Tensor, cpus: set[int], progress: Callable[[int, int], None]
) -> None:
    """Give memory its place, with one thread on each processor.

    Args:
        buffer: uint8, dense; becomes zero.
        cpus: Processors to use; those that this process may not use are left out,
            and none means all it may use.
        progress: Called with the bytes done and those of the buffer.
    """
    allowed = os.sched_getaffinity(0)
    chosen = (cpus & allowed) or allowed
    address, total = buffer.data_ptr(), buffer.numel()

    def zero(start: int) -> int:
        # Of this thread only.
        os.sched_setaffinity(0, chosen)
        size = min(TOUCH_CHUNK_BYTES, total - start)
        ctypes.memset(address + start, 0, size)
        return size

    done = 0
    with ThreadPoolExecutor(len(chosen)) as pool:
        starts = range(0, total, TOUCH_CHUNK_BYTES)
        for piece in as_completed([pool.submit(zero, start) for start in starts]):
            done += piece.result()
            progress(done, total)


def cpus_near(pci_address: str, sysfs: str = "/sys") -> set[int]:
    """Processors of the NUMA node that a device is attached to.

    Args:
        pci_address: As in sysfs, ``0000:3b:00.0``.
        sysfs: Root of sysfs.

    Returns:
        Their numbers; empty where the node is not known.
    """
    try:
        with open(f"{sysfs}/bus/pci/devices/{pci_address}/numa_node") as file:
            node = int(file.read())
        with open(f"{sysfs}/devices/system/node/node{node}/cpulist") as file:
            text = file.read().strip()
    except (OSError, ValueError):
        return set()
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
