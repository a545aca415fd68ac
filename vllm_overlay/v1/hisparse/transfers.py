# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Copies of pages that are under way, until every rank has ended them (R5)."""

from collections.abc import Iterable, Iterator

from .messages import PageCopy
from .pages import Direction, Page, Transfer


class Transfers:
    """Copies under way, oldest first.

    Args:
        num_ranks: Ranks that end each copy.

    Attributes:
        stalled: Directions in which a copy took too long and none has ended since:
            nobody should wait for those that are under way there.
        next_id: Id of the next copy.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._under_way: dict[int, Transfer] = {}
        self._num_pending = dict.fromkeys(Direction, 0)
        self.stalled: set[Direction] = set()
        self.next_id = self._next_overdue = 0

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._under_way.values())

    def num_pending(self, direction: Direction) -> int:
        """Copies whose pages wait for them."""
        return self._num_pending[direction]

    def start(
        self, page: Page, direction: Direction, indexer: int, latents: tuple[int, ...]
    ) -> PageCopy:
        """Begin to copy a page that has no copy under way.

        Args:
            page: The page.
            direction: Which way.
            indexer: Device block of the indexers, 0 to leave them out.
            latents: Device block of each stack, empty to leave them out.

        Returns:
            What the workers have to do.
        """
        assert page.transfer is None, page.page_id
        copy = PageCopy(self.next_id, page.page_id, indexer, latents)
        page.transfer = Transfer(copy, page, direction)
        self._under_way[self.next_id] = page.transfer
        self._num_pending[direction] += 1
        self.next_id += 1
        return copy

    def end(
        self, transfer_id: int, ranks: Iterable[int], has_failed: bool
    ) -> Transfer | None:
        """Note that ranks have ended a copy; unknown ones are ignored.

        Returns:
            The copy, once all ranks have: nothing of it is under way any more.
        """
        transfer = self._under_way.get(transfer_id)
        if transfer is None:
            return None
        transfer.ranks.update(ranks)
        transfer.has_failed |= has_failed
        if len(transfer.ranks) < self._num_ranks:
            return None
        self.stalled.discard(transfer.direction)
        if not transfer.is_abandoned:
            self._leave(transfer)
        del self._under_way[transfer_id]
        return transfer

    def abandon(self, transfer: Transfer) -> None:
        """Let the page of a copy go on without it."""
        assert not transfer.is_abandoned, transfer.copy
        transfer.is_abandoned = True
        self._leave(transfer)

    def _leave(self, transfer: Transfer) -> None:
        transfer.page.transfer = None
        self._num_pending[transfer.direction] -= 1

    def take_overdue(self, before_id: int) -> list[Transfer]:
        """Copies with ids before this one, each once: they take too long."""
        ids = range(self._next_overdue, before_id)
        overdue = [self._under_way[n] for n in ids if n in self._under_way]
        self._next_overdue = max(self._next_overdue, before_id)
        for transfer in overdue:
            transfer.is_overdue = True
            self.stalled.add(transfer.direction)
        return overdue
