# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Tables of int32 words that change a little in every step."""

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
import torch


class WordTables:
    """Named tables in one tensor: a step's changes are one copy and one launch.

    Args:
        shapes: Shape of each table by name.
        device: Where they lie.

    Attributes:
        tables: int32 views by name; zero at first.
    """

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], device: torch.device | str
    ) -> None:
        sizes = [prod(shape) for shape in shapes.values()]
        self._words = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        pieces = self._words.split(sizes)
        self.tables = {
            name: piece.view(shape)
            for (name, shape), piece in zip(shapes.items(), pieces)
        }
        starts = np.cumsum([0, *sizes[:-1]]).tolist()
        self._starts = dict(zip(shapes, starts))
        self._places: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def put(self, name: str, first: int, values: Sequence[int]) -> None:
        """Note new values of consecutive words of a table.

        A word may be named once between two calls of `flush`.
        """
        start = self._starts[name] + first
        self._places.append(np.arange(start, start + len(values)))
        self._values.append(np.asarray(values, dtype=np.int32))

    def put_at(self, name: str, places: Iterable[int], values: Iterable[int]) -> None:
        """Note new values of single words of a table."""
        places = np.fromiter(places, dtype=np.int64)
        self._places.append(self._starts[name] + places)
        self._values.append(np.fromiter(values, dtype=np.int32))

    def flush(self) -> None:
        """Write what was noted; the device's work is ordered by the stream."""
        if not self._places:
            return
        places = torch.from_numpy(np.concatenate(self._places))
        values = torch.from_numpy(np.concatenate(self._values))
        self._places, self._values = [], []
        device = self._words.device
        self._words.index_copy_(0, send(places, device), send(values, device))


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Values of the host on a device; the host does not wait for the copy."""
    if device.type != "cpu":
        # From other memory the copy would wait for what the device still does.
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
