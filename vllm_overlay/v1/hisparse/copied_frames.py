# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Frames whose pages are written back to the host and restored from it (D11, R5)."""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from .frames import Frames, ResidencyConfig
from .pages import Direction, Page, PageState, Start, Transfer
from .pool import NULL_BLOCK
from .transfers import Transfers


def ignore(page_id: int) -> None:
    """Do nothing about a page."""


class CopiedFrames(Frames):
    """Frames, and the copies that make and fill them.

    A base of `Residency`, which says what is copied when.

    Args:
        config: Sizes.
        hold: Called when a page's host copy starts to be needed by a copy under way:
            the host pool must not hand the page out (R5).
        unhold: Called when it is no longer needed.
        unpublish: Called when a page is lost that prefix hits may find (R7).

    Attributes:
        transfers: Copies under way.
        num_failed: Write-backs that failed so far.
        num_lost: Pages that had to be restored and were not, so far.
    """

    def __init__(
        self,
        config: ResidencyConfig,
        hold: Callable[[int], None] = ignore,
        unhold: Callable[[int], None] = ignore,
        unpublish: Callable[[int], None] = ignore,
    ) -> None:
        super().__init__(config)
        self._hold, self._unhold, self._unpublish = hold, unhold, unpublish
        self.num_failed = self.num_lost = 0
        self._failed_restores = 0  # since the last one that was completed
        self._to_write: OrderedDict[int, Page] = OrderedDict()
        self.transfers = Transfers(config.num_ranks)

    @property
    def num_pending(self) -> int:
        """Pages with a copy that is queued or under way."""
        return len(self._to_write) + sum(map(self.transfers.num_pending, Direction))

    def may_gain_room(self) -> bool:
        """Whether copies under way will make blocks available."""
        return self._may_end(Direction.TO_DEVICE) or self._may_end(
            Direction.TO_HOST, len(self._to_write)
        )

    def _may_end(self, way: Direction, num_queued: int = 0) -> bool:
        num_pending = num_queued + self.transfers.num_pending(way)
        return num_pending > 0 and way not in self.transfers.stalled

    def _queue(self, page: Page) -> None:
        is_dirty = page.state is PageState.DIRTY
        if is_dirty and not page.is_queued and not self._has_failed(page):
            page.is_queued = True
            self._to_write[page.page_id] = page
            self._hold(page.page_id)

    def _issue(self, page: Page) -> None:
        page.is_queued = False
        page.state = PageState.PENDING
        copy = self.transfers.start(
            page, Direction.TO_HOST, page.indexer_block, page.latent_blocks
        )
        self._update.write_backs.append(copy)

    def _cancel(self, page: Page) -> None:
        if page.is_queued:
            page.is_queued = False
            del self._to_write[page.page_id]
            self._unhold(page.page_id)

    def _restore(self, page_id: int, start: Start) -> None:
        """Begin to copy to the device what a request needs that starts like this."""
        page = self._pages.get(page_id)
        if page is not None:
            self._keep(page, latents_too=True)
        indexer = NULL_BLOCK
        latents: tuple[int, ...] = ()
        if page is None or not page.indexer_block:
            (indexer,) = self._take(1)
        if start is Start.WHOLE and (page is None or not page.latent_blocks):
            latents = self._take(self.config.num_stacks)
        if page is None:
            # Now, for taking blocks may have freed the frame.
            page = self._new_page(page_id, PageState.CLEAN, NULL_BLOCK, ())
        assert page.state is PageState.CLEAN, page_id
        self._hold(page_id)
        copy = self.transfers.start(page, Direction.TO_DEVICE, indexer, latents)
        self._update.restores.append(copy)

    def acknowledge(
        self, transfer_id: int, ranks: Iterable[int], has_failed: bool = False
    ) -> bool:
        """Note that ranks have ended a copy; unknown ones are ignored.

        Args:
            transfer_id: The copy.
            ranks: Ranks that have ended it.
            has_failed: Whether they could not complete it.

        Returns:
            Whether it is complete now, on every rank (R1), and its page has use of it.
        """
        transfer = self.transfers.end(transfer_id, ranks, has_failed)
        if transfer is None:
            return False
        self._unhold(transfer.copy.page_id)
        if transfer.restored:
            return self._end_restore(transfer)
        if transfer.is_abandoned:
            return False
        return self._end_write_back(transfer.page, transfer.has_failed)

    def _end_write_back(self, page: Page, has_failed: bool) -> bool:
        """A write-back that failed is tried again.

        A page that fails too often stays on the device as long as it has an owner, and
        is forgotten then.
        """
        self._count(page, -1)
        page.state = PageState.DIRTY if has_failed else PageState.CLEAN
        self._count(page, 1)
        if not has_failed:
            for owner, _ in page.owners.values():
                owner.num_convertible += 1
            self._offer(page)
            return True
        self.num_failed += 1
        page.num_failures += 1
        if not self._has_failed(page):
            self._queue(page)
        elif not page.owners:
            self._give_up(page)
        return False

    def _end_restore(self, transfer: Transfer) -> bool:
        """The page of a restore that failed is found no more, if it was waited for."""
        page, copy = transfer.page, transfer.copy
        if transfer.is_abandoned or transfer.has_failed:
            blocks = (copy.indexer_block, *copy.latent_blocks)
            self._blocks.give_back([block for block in blocks if block != NULL_BLOCK])
            if not transfer.is_abandoned:
                self._failed_restores += 1
                page.num_failures += 1
                self._do_without(page)
            return False
        if copy.indexer_block:
            self._gain_indexer(page, copy.indexer_block)
        if copy.latent_blocks:
            self._gain_latents(page, copy.latent_blocks)
        self._offer(page)
        self._failed_restores = 0
        return True

    def _do_without(self, page: Page) -> None:
        """Note that what was to be restored of a page does not come."""
        waiting = [start for start in page.claims.values() if not page.is_ready(start)]
        if page.owners and not waiting:
            # Restored because there was room: the owners read it from the host.
            self._offer(page)
        else:
            self._lose(page.page_id)

    def _lose(self, page_id: int) -> None:
        """Let nobody find a page that is not restored; it is computed again."""
        self.num_lost += 1
        self._unpublish(page_id)
        page = self._pages.get(page_id)
        if page is not None and page.transfer is not None:
            self.transfers.abandon(page.transfer)
        if page is not None and not page.indexer_block:
            self._drop(page)
        elif page is not None:
            self._offer(page)

    def _has_failed(self, page: Page) -> bool:
        """Whether a page cannot be copied, however often it is tried."""
        return page.num_failures >= self.config.max_failures

    def _is_hopeless(self, page: Page) -> bool:
        is_stalled = Direction.TO_HOST in self.transfers.stalled
        is_overdue = page.transfer is not None and page.transfer.is_overdue
        return is_stalled or is_overdue or self._has_failed(page)

    def give_up_overdue(self, before_id: int) -> set[Direction]:
        """Stop waiting for copies that take too long; there is a clock outside.

        Pages that are being written back and that nobody owns are given up now, others
        when their owners leave. Whoever needs a page that is being restored computes it
        again. Blocks and host pages stay held until the copies end.

        Args:
            before_id: Copies with ids before this one take too long.

        Returns:
            Directions in which none was too long before.
        """
        before = set(self.transfers.stalled)
        for transfer in self.transfers.take_overdue(before_id):
            if transfer.restored and not transfer.is_abandoned:
                self.transfers.abandon(transfer)
                self._do_without(transfer.page)
        ways = self.transfers.stalled - before
        if Direction.TO_HOST in ways:
            not_clean = [p for p in self._pages.values() if p.state != PageState.CLEAN]
            for page in not_clean:
                if not page.owners:
                    self._give_up(page)
        return ways

    def _give_up(self, page: Page) -> None:
        """Forget a page that nobody owns and that does not get to the host."""
        self._unpublish(page.page_id)
        self._forget(page)

    def _forget(self, page: Page) -> None:
        """Drop a page whatever it waits for.

        A copy of it may still be under way: its host page, and blocks that it fills,
        are held until it ends.
        """
        self._cancel(page)
        if page.transfer is not None:
            self.transfers.abandon(page.transfer)
        self._drop(page)

    @property
    def num_holds(self) -> int:
        """References that copies hold to host pages, under way or queued."""
        return len(list(self.transfers)) + len(self._to_write)

    @property
    def abandoned_pages(self) -> list[int]:
        """Host pages that copies still hold, though no page waits for these."""
        return [t.copy.page_id for t in self.transfers if t.is_abandoned]
