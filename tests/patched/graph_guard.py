# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Refuses what a captured graph cannot hold, while code runs on a device of no values.

Torch's meta device has shapes, strides and memory with an identity, but no values. The
launchers take it for a GPU, so launches are cut as on one.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launch_recorder import RecordedLaunch

# Operations that hand a value, or a shape that depends on one, to Python.
_READS = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "allclose",
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
    "bincount",
}
_WAITS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (torch.cuda, ("synchronize",)),
    (torch.cuda.Stream, ("synchronize",)),
    (torch.cuda.Event, ("synchronize", "query")),
)


class NotInAGraphError(Exception):
    """Something was done that a replay would not repeat, or a capture refuses."""


class GraphGuard(TorchDispatchMode):
    """Context manager: no host read, no new memory, no waiting.

    Args:
        new_memory: Whether operations may give new memory all the same: between steps,
            outside a graph, they may.
    """

    def __init__(self, new_memory: bool = False) -> None:
        super().__init__()
        self._new_memory = new_memory
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> "GraphGuard":
        for owner, names in _WAITS:
            for name in names:
                self._patch.setattr(owner, name, _refuse(f"waits: {name}"))
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._patch.undo()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        known = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if name in _READS or _leaves_the_device(name, args, kwargs):
            raise NotInAGraphError(f"reads a value of the device: {func}")
        out = func(*args, **kwargs)
        memory = {memory_of(tensor) for tensor in known}
        for tensor in tree_leaves(out):
            is_new = (
                isinstance(tensor, torch.Tensor) and memory_of(tensor) not in memory
            )
            if is_new and not self._new_memory:
                raise NotInAGraphError(f"gives new memory: {func}")
        return out


def _leaves_the_device(name: str, args: tuple, kwargs: dict) -> bool:
    if name == "_to_copy":
        to = kwargs.get("device")
        return to is not None and torch.device(to).type == "cpu" != args[0].device.type
    if name == "copy_":
        return args[0].device.type == "cpu" != args[1].device.type
    return False


def _refuse(text: str) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise NotInAGraphError(text)

    return refuse


def memory_of(tensor: torch.Tensor) -> int:
    """Names the memory that a tensor is a view of."""
    return tensor.untyped_storage()._cdata


def kept_by_a_graph(launch: RecordedLaunch) -> tuple:
    """What a graph keeps of a launch: kernel, grid, addresses and values."""

    def kept(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        place = (memory_of(value), value.storage_offset())
        return (*place, value.dtype, value.shape, value.stride())

    sizes = {name: kept(value) for name, value in launch.sizes.items()}
    return launch.name, launch.grid, tuple(map(kept, launch.args)), sizes
