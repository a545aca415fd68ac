# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Work that is done ahead of need, beside the compute stream (D24).

A unit's followers read the rows that their leader resolved: their hot rows can be
fetched while the layers before them compute. Every piece is joined again by the layer
that needs it, so that a captured graph holds all of it.
"""

from collections.abc import Callable
from typing import Protocol

import torch


class Ahead(Protocol):
    """Runs pieces of work ahead, in order."""

    def start(self, pieces: list[Callable[[], None]]) -> None:
        """Begin pieces; each may read what the compute stream was given before."""

    def join(self, number: int) -> None:
        """Let the compute stream wait for a piece of the last `start`."""


class InOrder:
    """Runs pieces at once; for devices without streams."""

    def start(self, pieces: list[Callable[[], None]]) -> None:
        """See `Ahead`."""
        for piece in pieces:
            piece()

    def join(self, number: int) -> None:
        """See `Ahead`."""


class SideStream:
    """Runs pieces on a stream of its own.

    What the pieces read, and the plan that they follow, must not be written before
    they are joined: the next leader comes behind the last follower.

    Args:
        stream: Shared by the units, which run one after another.
        most: Pieces of one `start`, at most.
        must_end: Whether a capture goes on behind this piece of eager work: it fails if
            a stream that it does not know is still busy then.
    """

    def __init__(
        self,
        stream: "torch.cuda.Stream",
        most: int,
        must_end: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stream, self._must_end = stream, must_end
        self._fork = torch.cuda.Event()
        self._ends = [torch.cuda.Event() for _ in range(most)]

    def start(self, pieces: list[Callable[[], None]]) -> None:
        """See `Ahead`."""
        if not pieces:
            return  # A capture fails where a stream is forked and never joined.
        if self._must_end():
            InOrder().start(pieces)
            return
        self._fork.record(torch.cuda.current_stream())
        self._stream.wait_event(self._fork)
        with torch.cuda.stream(self._stream):
            for piece, end in zip(pieces, self._ends):
                piece()
                end.record(self._stream)

    def join(self, number: int) -> None:
        """See `Ahead`."""
        torch.cuda.current_stream().wait_event(self._ends[number])
