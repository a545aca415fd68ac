# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Memory that the ranks of one node share (D19)."""

import mmap
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Protocol

from ..host_memory import SHARED, check_shared_memory


class Sharers(Protocol):
    """Ranks that make their host pools together; those of one node have one.

    Attributes:
        rank: This rank among all of them.
        node: Ranks of this rank's node, in order.
    """

    rank: int
    node: Sequence[int]

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's value, by rank. All of them call it, and wait for each other."""


class OneRank:
    """A rank without others."""

    rank: int = 0
    node: Sequence[int] = (0,)

    def exchange(self, value: Any) -> list[Any]:
        """See `Sharers`."""
        return [value]


ONE_RANK = OneRank()


def raise_together(sharers: Sharers, error: str) -> None:
    """Raise the same error on every rank if one of them has one, and else go on.

    Raises:
        RuntimeError: the first rank's that has one.
    """
    for text in sharers.exchange(error):
        if text:
            raise RuntimeError(text)


def zeroed_memory(num_bytes: int, sharers: Sharers) -> mmap.mmap:
    """Memory of a node's ranks; zero, and it takes no room until it is touched.

    A rank that is alone on its node gets memory of its own. Of several the first makes
    a file in memory, and all map it. It has no name any more when this returns: the
    memory goes with the last process that maps it, however that one ends.

    Raises:
        RuntimeError: some rank cannot map it; then it is raised on every rank.
    """
    path = error = ""
    first, is_alone = sharers.node[0], len(sharers.node) == 1
    if sharers.rank == first and not is_alone:
        path, error = _create(num_bytes)
    memory = None
    try:
        name, error = sharers.exchange((path, error))[first]
        if is_alone:
            memory = mmap.mmap(-1, num_bytes)
        elif not error:
            memory, error = _map(name, num_bytes)
        raise_together(sharers, error)
    finally:
        if path:
            Path(path).unlink(missing_ok=True)
    assert memory is not None
    return memory


def _create(num_bytes: int) -> tuple[str, str]:
    """Path of a new file, and the reason why it cannot be used."""
    path = ""
    try:
        check_shared_memory("host_pool_gib", num_bytes)
        with NamedTemporaryFile(dir=SHARED, prefix="hisparse-", delete=False) as file:
            path = file.name
            file.truncate(num_bytes)
    except OSError as error:
        return path, f"HiSparse: the host pool cannot be made in {SHARED}: {error}"
    except ValueError as error:
        return path, str(error)
    return path, ""


def _map(path: str, num_bytes: int) -> tuple[mmap.mmap | None, str]:
    """The file's memory, or the reason why it cannot be mapped."""
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), num_bytes), ""
    except OSError as error:
        return None, f"HiSparse: a rank cannot map the host pool: {error}"
