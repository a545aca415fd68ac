# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Refuses what a captured graph cannot hold, and notes what it would keep.

Torch's meta device has shapes, strides and memory with an identity, but no values. The
launchers take it for a GPU, so launches are cut as on one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from launch_recorder import LaunchRecorder, RecordedLaunch

# Operations that hand a value, or a shape that depends on one, to Python: torch tags
# most of them, but not these. By its tag `index` would be one whatever it is given.
_READS = {"equal", "allclose", "is_nonzero"}
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_MASKS = (torch.bool, torch.uint8)
# Whoever calls one of these waits for the device, or a capture refuses it.
_WAITS = {
    "torch._C": ("_cuda_synchronize", "_accelerator_synchronizeDevice"),
    "torch.cuda": ("synchronize", "empty_cache", "ipc_collect", "cudart"),
    "torch.cuda.Stream": ("synchronize", "query"),
    "torch.cuda.Event": ("synchronize", "query", "elapsed_time", "ipc_handle"),
    "torch.accelerator": ("synchronize", "empty_cache"),
    "torch.distributed": ("barrier", "monitored_barrier"),
}
# Types that cannot be changed; in their place is one with other methods.
_GENERIC = {
    "Stream": ("synchronize", "query"),
    "Event": ("synchronize", "query", "elapsed_time", "ipc_handle"),
}
# Not all of these show as an operation.
_HOST_DATA = {
    "torch": ("tensor", "as_tensor", "asarray", "from_numpy", "frombuffer"),
    "torch.Tensor": ("new_tensor",),
}


class NotInAGraphError(Exception):
    """Something was done that a replay would not repeat, or a capture refuses."""


@dataclass(frozen=True)
class KeptTensor:
    """A tensor by its memory, which stays as long as this does.

    Attributes:
        place: Memory, offset, dtype, shape and strides.
        tensor: Not compared.
    """

    place: tuple
    tensor: torch.Tensor = field(compare=False, repr=False)


def kept(values: Any) -> Any:
    """What a graph keeps of arguments: tensors by their addresses, and values."""

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        place = (_memory(value)[0], value.storage_offset(), value.dtype)
        return KeptTensor((*place, tuple(value.shape), value.stride()), value)

    return tree_map(one, values)


class GraphGuard(TorchDispatchMode):
    """Context manager: no host read, no new memory, no waiting, no data of the host.

    Launches and operations of torch, other than views, are noted. Launches do not run.

    Args:
        log: They are noted here; stand-ins for streams may add what they are asked.
        between_steps: Whether this is outside a graph, where operations may give new
            memory and take data of the host, as long as nothing is waited for.
    """

    def __init__(self, log: list, between_steps: bool = False) -> None:
        super().__init__()
        self._log, self._between_steps = log, between_steps
        self._launches = _Launches(log)
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> "GraphGuard":
        patch = self._patch
        for path, names in _WAITS.items():
            for name in names:
                refusal = _refuse(f"waits: {name}")
                patch.setattr(resolve_name(path), name, refusal, raising=False)
        for kind, names in _GENERIC.items():
            methods = {name: _refuse(f"waits: {name}") for name in names}
            # Not torch.Event itself: vLLM's CPU runner leaves a stand-in there.
            patch.setattr(torch, kind, type(kind, (getattr(torch._C, kind),), methods))
        for path, names in _HOST_DATA.items():
            for name in names:
                original = getattr(resolve_name(path), name)
                patch.setattr(resolve_name(path), name, self._host_data(original))
        patch.setattr(torch._tensor_str, "_str", _refuse("reads a value: to print it"))
        self._launches.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._launches.__exit__()
        self._patch.undo()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        known = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        devices = {tensor.device.type for tensor in known}
        on_host_only = self._between_steps and devices == {"cpu"}
        if not on_host_only and _reads(func, name, args):
            raise NotInAGraphError(f"reads a value of the device: {func}")
        self._check_crossing(func, name, args, kwargs, devices)
        # `resize_` and `set_` give an old tensor new memory.
        memory = {_memory(tensor) for tensor in known}
        out = func(*args, **kwargs)
        outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if not self._between_steps and {_memory(t) for t in outputs} - memory:
            raise NotInAGraphError(f"gives new memory: {func}")
        if not func.is_view:
            self._log.append(("torch", str(func), kept(args), kept(kwargs)))
        return out

    def _check_crossing(
        self, func: Any, name: str, args: tuple, kwargs: dict, devices: set[str]
    ) -> None:
        """Look at operations with tensors of both the host and the device."""
        target = args[0].device.type if name == "copy_" else None
        if name == "_to_copy" and kwargs.get("device") is not None:
            target = torch.device(kwargs["device"]).type
            devices = devices | {target}
        if len(devices) > 1 and target == "cpu":
            raise NotInAGraphError(f"reads a value of the device: {func}")
        if not self._between_steps and (len(devices) > 1 or name == "lift_fresh"):
            raise NotInAGraphError(f"takes data of the host: {func}")
        if len(devices) > 1 and target is not None:
            is_waited_for = not kwargs.get("non_blocking", args[2:3] == (True,))
            source = args[1] if name == "copy_" else args[0]
            if is_waited_for or not hasattr(source, "is_marked_as_pinned"):
                raise NotInAGraphError(f"waits: a copy from memory not pinned, {func}")

    def _host_data(self, original: Callable) -> Callable:
        """Refuse what makes a tensor of Python's values without an operation."""

        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if not self._between_steps:
                name = original.__name__
                raise NotInAGraphError(f"takes data of the host: {name}")
            made = original(*args, **kwargs)
            if made.device.type != "cpu":
                raise NotInAGraphError("waits: a copy from memory not pinned")
            return made

        return make


class _Launches(LaunchRecorder):
    def __init__(self, log: list) -> None:
        super().__init__(run=False)
        self._log = log

    def note(self, launch: RecordedLaunch) -> None:
        arguments = kept(launch.args), kept(launch.sizes)
        self._log.append(("launch", launch.name, launch.grid, *arguments))


def _reads(func: Any, name: str, args: tuple) -> bool:
    if name in _INDEXING:
        indices = [i for i in args[1] if i is not None]
        return any(index.dtype in _MASKS for index in indices)
    return name in _READS or bool(_TAGS.intersection(func.tags))


def _refuse(text: str) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise NotInAGraphError(text)

    return refuse


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Names the memory that a tensor is a view of, and its bytes."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()
