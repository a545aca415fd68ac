# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Runs the launchers on a device over tensors that live on the CPU.

The tests of this folder build their tensors on the CPU, and so do the references.
Where `HISPARSE_TEST_DEVICE` names a device, each launch gets copies of its arguments
there, laid out as the originals are, and what it wrote comes back. Host pools cross
into pinned memory, which the kernels then read in place. Guards around every copy
show a store that leaves it.
"""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch

# The device named by the environment; None: launch over the tests' own tensors.
DEVICE = os.environ.get("HISPARSE_TEST_DEVICE")
ON_GPU = DEVICE is not None and DEVICE != "cpu"

GUARD, GUARD_BYTES = 0xA5, 512
# Larger memory is not copied: sparse files, which hardly have any bytes.
MOST_BYTES = 1 << 30
# Arguments that the kernels read from host memory.
IN_HOST_MEMORY = ("host_rows", "host_pages")


class Crossing:
    """Copies of one launch's arguments.

    Tensors that share memory share it there too. Tensors that are on a GPU already
    are passed as they are.

    Args:
        device: Where to.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        # By address of the memory: the original's bytes, and the guarded copy.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def move(self, value: Any, name: str) -> Any:
        """A value with every tensor in it replaced by its copy."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name in IN_HOST_MEMORY)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = dataclasses.fields(value)
            moved = {f.name: self.move(getattr(value, f.name), f.name) for f in fields}
            return dataclasses.replace(value, **moved)
        return value

    def _tensor(self, tensor: torch.Tensor, stays_on_host: bool) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu" or storage.nbytes() > MOST_BYTES:
            return tensor
        if storage.data_ptr() not in self._copies:
            original = torch.empty(0, dtype=torch.uint8).set_(storage)
            size = len(original) + 2 * GUARD_BYTES
            is_pinned = stays_on_host and self._device.type != "cpu"
            device = torch.device("cpu") if stays_on_host else self._device
            copy = torch.empty(
                size, dtype=torch.uint8, device=device, pin_memory=is_pinned
            )
            copy.fill_(GUARD)
            copy[GUARD_BYTES:-GUARD_BYTES] = original
            self._copies[storage.data_ptr()] = original, copy
        _, copy = self._copies[storage.data_ptr()]
        offset = GUARD_BYTES // tensor.itemsize + tensor.storage_offset()
        moved = torch.empty(0, dtype=tensor.dtype, device=copy.device)
        return moved.set_(copy.untyped_storage(), offset, tensor.shape, tensor.stride())

    def bring_back(self) -> None:
        """Copy everything back; fail where a guard was written to."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        for original, copy in self._copies.values():
            before, after = copy[:GUARD_BYTES], copy[-GUARD_BYTES:]
            assert (before == GUARD).all() and (after == GUARD).all(), (
                "a kernel wrote outside its arguments"
            )
            original.copy_(copy[GUARD_BYTES:-GUARD_BYTES])


def crossing_to(device: str, launcher: Callable[..., None]) -> Callable[..., None]:
    """A launcher that runs on a device over tensors that live on the CPU."""
    signature = inspect.signature(launcher)

    @functools.wraps(launcher)
    def launch(*args: Any, **sizes: Any) -> None:
        bound = signature.bind(*args, **sizes)
        crossing = Crossing(device)
        for name, value in bound.arguments.items():
            bound.arguments[name] = crossing.move(value, name)
        launcher(*bound.args, **bound.kwargs)
        crossing.bring_back()

    return launch


def cross_all(device: str) -> None:
    """Let all launchers run on a device; before a test imports one of them."""
    from kernels import (
        assign,
        fetch,
        lookup,
        reset,
        slots,
        staged_rows,
        staging,
        translate,
    )

    for module, names in (
        (assign, ["assign"]),
        (fetch, ["fetch_rows"]),
        (lookup, ["lookup"]),
        (reset, ["reset_rows"]),
        (slots, ["slot_mappings", "gather_indexer_table"]),
        (staged_rows, ["staged_rows", "copy_pages"]),
        (staging, ["mark_pages", "list_pages"]),
        (translate, ["translate"]),
    ):
        for name in names:
            setattr(module, name, crossing_to(device, getattr(module, name)))
