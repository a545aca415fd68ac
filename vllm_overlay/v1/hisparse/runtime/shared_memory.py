# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Memory that the ranks of one node share (D19)."""

import mmap
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Protocol

from ..host_memory import SHARED, check_shared_memory


class Sharers(Protocol):
    """Ranks of one node that have a host pool together.

    Attributes:
        index: Place of this rank among them.
        count: How many they are.
    """

    index: int
    count: int

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's value, by index. All of them call it, and wait for each other."""


class OneRank:
    """A rank that shares with nobody."""

    index, count = 0, 1

    def exchange(self, value: Any) -> list[Any]:
        """See `Sharers`."""
        return [value]


def zeroed_memory(num_bytes: int, sharers: Sharers) -> mmap.mmap:
    """Memory of these ranks; zero, and it takes no room until it is touched.

    One rank gets memory of its own. Of several the first makes a file in memory, and
    all map it. It has no name any more when this returns: the memory goes with the last
    process that maps it, however that one ends.

    Raises:
        RuntimeError: some rank cannot map it; then it is raised on every rank.
    """
    if sharers.count == 1:
        return mmap.mmap(-1, num_bytes)
    path = error = ""
    if sharers.index == 0:
        path, error = _create(num_bytes)
    path, error = sharers.exchange((path, error))[0]
    memory = None
    if not error:
        memory, error = _map(path, num_bytes)
    errors = list(filter(None, sharers.exchange(error)))
    if sharers.index == 0 and path:
        Path(path).unlink(missing_ok=True)
    if memory is None or errors:
        raise RuntimeError(errors[0])
    return memory


def _create(num_bytes: int) -> tuple[str, str]:
    """Path of a new file, and the reason why it cannot be used."""
    path = ""
    try:
        check_shared_memory("host_pool_gib", num_bytes)
        with NamedTemporaryFile(dir=SHARED, prefix="hisparse-", delete=False) as file:
            path = file.name
            file.truncate(num_bytes)
    except (OSError, ValueError) as error:
        return path, str(error)
    return path, ""


def _map(path: str, num_bytes: int) -> tuple[mmap.mmap | None, str]:
    """The file's memory, or the reason why it cannot be mapped."""
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), num_bytes), ""
    except OSError as error:
        return None, f"HiSparse: a rank cannot map the host pool: {error}"
