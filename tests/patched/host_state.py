# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What Python knows, before and after a forward pass: a replay repeats none of it."""

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from graph_guard import kept

_PACKAGE = "vllm.v1.hisparse"
# Objects of these packages are looked into; others are told apart by identity.
_LOOKED_INTO = (_PACKAGE, "vllm.v1.worker")
_VALUES = (bool, int, float, str, bytes, frozenset, Enum, type(None), np.generic)


@dataclass(frozen=True, eq=False)
class _Same:
    """Equal to itself only; holds its object, so that no other one gets its place."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def host_state(*roots: object) -> dict[str, Any]:
    """What can be reached from objects and from the package's modules, by path.

    Tensors count by address, shape and strides; on the CPU also by how often they were
    written. Arrays, numbers and texts count by value, other objects by identity.
    """
    modules = {n: m for n, m in sys.modules.items() if n.startswith(_PACKAGE)}
    state: dict[str, Any] = {}
    seen: set[int] = set()
    waiting: deque[tuple[str, Any]] = deque(modules.items())
    waiting.extend((f"{type(root).__name__} {n}", root) for n, root in enumerate(roots))
    while waiting:
        path, value = waiting.popleft()
        state[path] = _one(value)
        if id(value) in seen:
            continue
        if isinstance(state[path], _Same):
            seen.add(id(value))
        waiting.extend((path + step, inner) for step, inner in _inside(value))
    return state


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Paths at which two states differ."""
    missing = object()
    return [
        path
        for path in before | after
        if before.get(path, missing) != after.get(path, missing)
    ]


def _one(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        writes = value._version if value.device.type == "cpu" else 0
        return kept(value), writes
    if isinstance(value, np.ndarray):
        return value.ctypes.data, value.dtype, value.shape, value.tobytes()
    if isinstance(value, _VALUES):
        return value
    if isinstance(value, set):
        return _Same(value), frozenset(value)
    is_frozen = getattr(type(value), "__dataclass_params__", None)
    if isinstance(value, tuple) or (is_frozen is not None and is_frozen.frozen):
        return type(value)
    return _Same(value)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{place}]", item) for place, item in enumerate(value))
    elif isinstance(value, ModuleType):
        for name, item in vars(value).items():
            is_code = isinstance(item, (ModuleType, FunctionType, type))
            if not is_code and not name.startswith("__"):
                yield f".{name}", item
    elif type(value).__module__.startswith(_LOOKED_INTO):
        names = [n for c in type(value).__mro__ for n in getattr(c, "__slots__", ())]
        for name in (*getattr(value, "__dict__", ()), *names):
            if hasattr(value, name):
                yield f".{name}", getattr(value, name)
