# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Frames of pages in the device pool, and which of their blocks may be taken (D13)."""

from collections import OrderedDict
from dataclasses import dataclass

from .messages import RequestUpdate, StepUpdate
from .pages import Page, PageState, Place, RequestPages, Start
from .pool import NULL_BLOCK, BlockAllocator


@dataclass(frozen=True)
class ResidencyConfig:
    """Sizes of the device pool and of what is taken from it.

    Attributes:
        num_blocks: Blocks of the device pool, the null block included.
        num_stacks: Blocks of a frame beside the indexers' one.
        lease_blocks: Blocks of a hot lease.
        num_rows: Requests that can hold a lease at once.
        tail_pages: Pages that a request writes in one decode step.
        window_pages: Pages that the steps in flight can write, all together (D14).
        num_ranks: Ranks that acknowledge each copy.
        write_back_budget: Write-backs issued in one step.
        restore_budget: Pages restored in one step because there is room.
        claim_budget: Pages restored in one step for one waiting request.
        max_failures: Failed write-backs after which a page stays on the device, and
            failed restores in a row after which none is made that could be left out.
    """

    num_blocks: int
    num_stacks: int
    lease_blocks: int
    num_rows: int
    tail_pages: int = 2
    window_pages: int = 0
    num_ranks: int = 1
    write_back_budget: int = 1 << 30
    restore_budget: int = 16
    claim_budget: int = 1024
    max_failures: int = 3

    @property
    def frame_blocks(self) -> int:
        """Blocks of a whole frame."""
        return 1 + self.num_stacks

    def conversion_gain(self, num_pages: int) -> int:
        """Blocks that a decoding request of so many pages can do without."""
        mixed = num_pages + self.lease_blocks + self.tail_pages * self.frame_blocks
        return max(0, num_pages * self.frame_blocks - mixed)


class Frames:
    """Pages that have something on the device, in the blocks of one pool.

    A base of `CopiedFrames`, which knows the copies, and of `Residency`.

    Args:
        config: Sizes.
    """

    def __init__(self, config: ResidencyConfig) -> None:
        self.config = config
        self._blocks = BlockAllocator(config.num_blocks)
        # Frame 0 is the null frame, as block 0 is the null block.
        self._free_frames = list(range(config.num_blocks - 1, 0, -1))
        self._pages: dict[int, Page] = {}
        # Clean parts whose blocks may be taken, least recently used first.
        self._evictable_latents: OrderedDict[int, Page] = OrderedDict()
        self._evictable_indexers: OrderedDict[int, Page] = OrderedDict()
        self._num_owned = dict.fromkeys(Place, 0)
        self._update = StepUpdate()

    @property
    def num_free(self) -> int:
        """Blocks that can be had at once: free ones and evictable ones."""
        return (
            len(self._blocks)
            + len(self._evictable_latents) * self.config.num_stacks
            + len(self._evictable_indexers)
        )

    def num_owned(self, place: Place) -> int:
        """Pages of running requests whose latents are there."""
        return self._num_owned[place]

    def _count(self, page: Page, change: int) -> None:
        """Take a page out of the count before it changes, and put it in after."""
        if page.owners:
            self._num_owned[page.place] += change

    def _new_page(
        self, page_id: int, state: PageState, indexer: int, latents: tuple[int, ...]
    ) -> Page:
        page = Page(page_id, self._free_frames.pop(), state, indexer, latents)
        self._pages[page_id] = page
        self._frame_changed(page)
        return page

    def _frame_changed(self, page: Page) -> None:
        latents = page.latent_blocks or (NULL_BLOCK,) * self.config.num_stacks
        self._update.frames[page.frame_id] = (page.indexer_block, *latents)
        for owner, index in page.owners.values():
            if index < owner.num_sent:
                self._changed(owner).changed[index] = page.entry

    def _changed(self, request: RequestPages) -> RequestUpdate:
        return self._update.requests.setdefault(
            request.request_id, RequestUpdate(start=request.num_sent)
        )

    def _own(self, request: RequestPages, page: Page) -> None:
        assert request.request_id not in page.owners, page.page_id
        self._count(page, -1)
        page.owners[request.request_id] = (request, len(request.pages))
        page.num_unleased += request.lease is None
        self._count(page, 1)
        request.pages.append(page)
        if not page.latent_blocks:
            request.host_only[len(request.pages) - 1] = page
        elif page.state is PageState.CLEAN:
            request.num_convertible += 1
        self._offer(page)
        self._changed(request)

    def _offer(self, page: Page) -> None:
        """Make evictable what may go.

        R1: it is clean. R2: every owner has its lease. R5: no copy reads or writes it.
        What a waiting request has claimed stays.
        """
        if page.state is not PageState.CLEAN or page.transfer is not None:
            return
        is_claimed = Start.WHOLE in page.claims.values()
        if page.latent_blocks and not page.num_unleased and not is_claimed:
            self._evictable_latents[page.page_id] = page
        if page.indexer_block and not page.owners and not page.claims:
            self._evictable_indexers[page.page_id] = page

    def _keep(self, page: Page, latents_too: bool) -> None:
        """Make a page no longer evictable."""
        self._evictable_indexers.pop(page.page_id, None)
        if latents_too:
            self._evictable_latents.pop(page.page_id, None)

    def _take(self, count: int) -> tuple[int, ...]:
        while len(self._blocks) < count:
            if self._evictable_latents:
                _, page = self._evictable_latents.popitem(last=False)
                self._lose_latents(page)
            else:
                _, page = self._evictable_indexers.popitem(last=False)
                self._lose_indexer(page)
            if not page.latent_blocks and not page.indexer_block:
                self._drop(page)
        return self._blocks.take(count)

    def _gain_latents(self, page: Page, blocks: tuple[int, ...]) -> None:
        self._count(page, -1)
        page.latent_blocks = blocks
        self._count(page, 1)
        for owner, index in page.owners.values():
            owner.num_convertible += 1
            del owner.host_only[index]
        self._frame_changed(page)

    def _lose_latents(self, page: Page) -> None:
        self._blocks.give_back(page.latent_blocks)
        self._count(page, -1)
        page.latent_blocks = ()
        self._count(page, 1)
        for owner, index in page.owners.values():
            owner.num_convertible -= 1
            owner.host_only[index] = page
        self._frame_changed(page)

    def _gain_indexer(self, page: Page, block: int) -> None:
        page.indexer_block = block
        self._frame_changed(page)

    def _lose_indexer(self, page: Page) -> None:
        self._blocks.give_back((page.indexer_block,))
        page.indexer_block = NULL_BLOCK
        self._frame_changed(page)

    def _drop(self, page: Page) -> None:
        """Take a page's frame away; its host copy, if any, is all that is left."""
        assert not page.owners and not page.is_queued, page.page_id
        assert page.transfer is None, page.page_id
        self._evictable_latents.pop(page.page_id, None)
        self._evictable_indexers.pop(page.page_id, None)
        if page.latent_blocks:
            self._lose_latents(page)
        if page.indexer_block:
            self._lose_indexer(page)
        self._free_frames.append(page.frame_id)
        del self._pages[page.page_id]
