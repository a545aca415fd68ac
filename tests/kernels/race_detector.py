# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Finds races that Triton's interpreter hides.

The interpreter runs each operation for a whole program, and programs one after the
other. On a GPU the threads of a program run apart between barriers, and programs run
at the same time. Two different operations that touch the same address, one of them
writing, therefore need a barrier between them within a program, and are never right
in two programs of one launch, unless both write the same value.

Not seen: two lanes of one store to one address, and scalar loads that the compiler
repeats in each thread.
"""

import sys
from dataclasses import dataclass
from types import FrameType

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


@dataclass(frozen=True)
class Race:
    """Two operations that touch the same byte without an order."""

    kind: str  # RAW, WAR, WAW; with "cross-program " before it
    earlier: str
    later: str
    address: int

    def __str__(self) -> str:
        return f"{self.kind}: {self.later} after {self.earlier}, {self.address:#x}"


def _place() -> str:
    """File and line of the kernel statement that is running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if "triton" not in name and name != __file__:
            return f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _bytes_of(pointers: np.ndarray, mask: np.ndarray, width: int) -> np.ndarray:
    """Addresses of all bytes that the active lanes touch, without duplicates.

    Scalars come as arrays of no or one dimension, so shapes are not compared.
    """
    pointers, mask = np.broadcast_arrays(pointers.ravel(), mask.ravel() != 0)
    base = np.unique(pointers[mask].astype(np.int64))
    return (base[:, None] + np.arange(width)).ravel()


class RaceDetector:
    """Context manager; `races` holds what the launches inside it did wrong.

    Launches are told apart by the grid position starting over at (0, 0, 0).

    Args:
        without: Places, "file.py:line", of barriers to leave out.
    """

    def __init__(self, without: frozenset[str] = frozenset()) -> None:
        self.races: list[Race] = []
        self.barriers: set[str] = set()
        self._without = without
        self._segment: dict[str, list] = {"read": [], "write": []}
        self._program: dict[str, list] = {"read": [], "write": []}
        self._others: dict[str, list] = {"read": [], "write": []}

    def __enter__(self) -> "RaceDetector":
        builder = interpreter.InterpreterBuilder
        names = (
            "create_masked_load",
            "create_masked_store",
            "create_barrier",
            "set_grid_idx",
        )
        self._saved = {name: getattr(builder, name) for name in names}
        saved = self._saved

        def load(itself, pointers, mask, *args):
            width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            self._touch("read", _bytes_of(pointers.data, mask.data, width), None)
            return saved["create_masked_load"](itself, pointers, mask, *args)

        def store(itself, pointers, value, mask, *args):
            width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            touched = _bytes_of(pointers.data, mask.data, width)
            result = saved["create_masked_store"](itself, pointers, value, mask, *args)
            written = value.data.ravel()
            if written.size == mask.data.size:
                written = written[mask.data.ravel() != 0]
            same = written[0] if np.unique(written).size == 1 else None
            self._touch("write", touched, same)
            return result

        def barrier(itself):
            self.barriers.add(_place())
            if _place() not in self._without:
                self._end_segment()
            return saved["create_barrier"](itself)

        def set_grid_idx(itself, x, y, z):
            self._end_program(new_launch=(x, y, z) == (0, 0, 0))
            return saved["set_grid_idx"](itself, x, y, z)

        for name, hook in zip(names, (load, store, barrier, set_grid_idx)):
            setattr(builder, name, hook)
        # vLLM's CPU worker replaces the barrier by a function that does nothing.
        self._barrier = tl.debug_barrier
        tl.debug_barrier = tl.core.debug_barrier
        return self

    def __exit__(self, *exc: object) -> None:
        self._end_program(new_launch=True)
        tl.debug_barrier = self._barrier
        for name, method in self._saved.items():
            setattr(interpreter.InterpreterBuilder, name, method)

    def _touch(self, what: str, addresses: np.ndarray, value: object) -> None:
        if not addresses.size:
            return
        op = (_place(), addresses, value)
        self._compare(op, what, self._segment, "")
        self._compare(op, what, self._others, "cross-program ")
        self._segment[what].append(op)

    def _compare(self, op: tuple, what: str, sets: dict, prefix: str) -> None:
        against = {"read": ("write",), "write": ("read", "write")}[what]
        for kind in against:
            for place, addresses, value in sets[kind]:
                marks = what == kind == "write" and value is not None
                if prefix and marks and value == op[2]:
                    continue
                low = max(addresses.min(), op[1].min())
                if low > min(addresses.max(), op[1].max()):
                    continue
                common = np.intersect1d(addresses, op[1])
                if common.size:
                    name = {"read": "WAR", "write": "WAW"}[kind]
                    name = "RAW" if what == "read" else name
                    race = Race(prefix + name, place, op[0], int(common[0]))
                    self.races.append(race)

    def _end_segment(self) -> None:
        for what, ops in self._segment.items():
            self._program[what] += ops
            ops.clear()

    def _end_program(self, new_launch: bool) -> None:
        self._end_segment()
        for what, ops in self._program.items():
            # One entry for each statement and value, however many programs ran it.
            merged = {(place, value): old for place, old, value in self._others[what]}
            for place, addresses, value in ops:
                old = merged.get((place, value), addresses)
                merged[place, value] = np.union1d(old, addresses)
            self._others[what] = [(p, a, value) for (p, value), a in merged.items()]
            ops.clear()
            if new_launch:
                self._others[what].clear()
