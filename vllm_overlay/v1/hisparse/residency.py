# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Which pages are on the device, and who may take their blocks (D6-D15, R1-R8).

A buffer manager in the classic shape. Pages live in the host pool and are named by
their place there. A page's *frame* holds it on the device: one block for all its
indexers and one for each stack of latent layers. A request that gives its cold
pages away holds a *hot lease* first.

Pure bookkeeping: ids come in, a `StepUpdate` goes out, copies are acknowledged from
outside. Nothing here knows tensors, clocks or vLLM. The work of a step is
proportional to what changed in it, not to the length of any context.
"""

from collections.abc import Callable, Iterable
from heapq import nlargest
from itertools import takewhile

from .copied_frames import CopiedFrames, ignore
from .frames import ResidencyConfig
from .messages import HotLease, RequestUpdate, StepUpdate
from .pages import Claim, Direction, PageState, RequestPages, Start


class Residency(CopiedFrames):
    """The device pool's frames and leases, and the pages in them.

    Args:
        config: Sizes.
        hold: See `CopiedFrames`, as for the next two.
        unhold: A page is not needed by copies any longer.
        unpublish: A page is lost that prefix hits may find.

    Attributes:
        num_device_hits: Pages found by prefix hits so far, with latents on the device.
        num_host_hits: Likewise, with latents on the host only.
    """

    def __init__(
        self,
        config: ResidencyConfig,
        hold: Callable[[int], None] = ignore,
        unhold: Callable[[int], None] = ignore,
        unpublish: Callable[[int], None] = ignore,
    ) -> None:
        super().__init__(config, hold, unhold, unpublish)
        self.num_device_hits = self.num_host_hits = 0
        self._free_rows = list(range(config.num_rows - 1, -1, -1))
        self._requests: dict[str, RequestPages] = {}
        self._claims: dict[str, Claim] = {}
        self._turn = 0
        self._num_sharings = 0  # changes of who shares a page, or holds a lease
        self._promised_pages = 0

    # --- capacity -------------------------------------------------------------

    @property
    def num_leases(self) -> int:
        """Requests that hold a hot lease."""
        return self.config.num_rows - len(self._free_rows)

    def can_admit(self, num_pages: int) -> bool:
        """Whether a request of so many pages fits at steady state (D14).

        Every admitted request counts with what it can be brought down to while there
        is a row for its lease; the pages that steps in flight write count once for
        all of them. What fits whole needs neither.
        """
        config = self.config
        whole = (self._promised_pages + num_pages) * config.frame_blocks
        if not self._requests or whole < config.num_blocks:
            return True
        window = config.window_pages * config.num_stacks
        return whole + window - self._most_gain(num_pages) < config.num_blocks

    def _most_gain(self, num_pages: int) -> int:
        """Blocks to be had by conversion, beside a new request of so many pages."""
        gain, gains = 0, [self.config.conversion_gain(num_pages)]
        for request in self._requests.values():
            own = self.config.conversion_gain(request.num_promised)
            if request.lease is None:
                gains.append(own)
            else:
                gain += own
        return gain + sum(nlargest(len(self._free_rows), gains))

    def make_room(self, blocks: int, is_waiting: bool = False) -> bool:
        """Make requests give pages away until so many blocks are free (D12).

        Each step takes the request whose conversion frees most; it gets its lease
        before any of its pages may go (R2). One lease more is kept free, or nobody
        could be converted; it is given up only when no write-back is under way that
        would make room. If that is not enough, claims go: all of them for a running
        request; for a waiting one those that nobody before it has asked for in this
        step, or two could take turns in taking each other's.

        Args:
            blocks: Blocks to be had.
            is_waiting: Whether it is a waiting request that wants them.

        Returns:
            Whether the blocks may be taken now.
        """
        if self._convert_for(blocks):
            return True
        weak = [
            request_id
            for request_id, claim in self._claims.items()
            if not is_waiting or claim.turn < self._turn
        ]
        for request_id in weak:
            self.drop_claim(request_id)
        return bool(weak) and self._convert_for(blocks)

    def _convert_for(self, blocks: int) -> bool:
        reserve = self.config.lease_blocks
        while self.num_free < blocks + reserve:
            request = self._best_conversion()
            if request is None:
                break
            self._grant_lease(request)
        if self.num_free >= blocks + reserve or not self._needs_reserve():
            return self.num_free >= blocks
        waits = self._may_end(Direction.TO_HOST, len(self._to_write))
        return self.num_free >= blocks and not waits

    def _needs_reserve(self) -> bool:
        """Whether a request may get a lease, and has more to give than one takes."""
        return bool(self._free_rows) and any(
            r.lease is None and self._gain(r, len(r.pages)) > 0
            for r in self._requests.values()
        )

    def _gain(self, request: RequestPages, num_pages: int) -> float:
        """Blocks that a request's lease frees, if so many of its pages may go.

        A shared page goes when the last owner has a lease: each is credited with a part
        of it. Requests of which none could free anything by itself are converted
        together so, and those that would get back less than their leases never.
        """
        if request.shared_at != self._num_sharings:
            request.shared_at = self._num_sharings
            # What requests share is where they begin.
            shared = takewhile(lambda page: len(page.owners) > 1, request.pages)
            owners = (page.num_unleased for page in shared)
            request.num_shared = sum(1 - 1 / n for n in owners if n > 1)
        config = self.config
        pages = num_pages - request.num_shared
        return pages * config.num_stacks - config.lease_blocks

    def _best_conversion(self) -> RequestPages | None:
        config = self.config
        if not self._free_rows or self.num_free < config.lease_blocks:
            return None

        def gain(request: RequestPages) -> float:
            return self._gain(request, request.num_convertible)

        candidates = (r for r in self._requests.values() if r.lease is None)
        best = max(candidates, key=gain, default=None)
        if best is None or gain(best) <= 0:
            return None
        return best

    # --- requests -------------------------------------------------------------

    def add_request(self, request_id: str, num_promised: int) -> None:
        """Start to keep a request's pages.

        Args:
            request_id: Not known yet, or released.
            num_promised: Pages that it will want, as far as admission knows; see
                `promise`.
        """
        assert request_id not in self._requests, request_id
        request = RequestPages(request_id, num_promised)
        self._requests[request_id] = request
        self._promised_pages += num_promised
        self._update.requests[request_id] = RequestUpdate(start=0)

    def resend(self, request_id: str) -> None:
        """Hand a request's whole table out again: workers may give it another row."""
        request = self._requests[request_id]
        request.num_sent = 0
        update = RequestUpdate(start=0, lease=request.lease)
        self._update.requests[request_id] = update

    def append(self, request_id: str, page_ids: Iterable[int]) -> None:
        """Give a request new pages with frames of their own, not yet written.

        The blocks must have been made free before (`make_room`).
        """
        request = self._requests[request_id]
        for page_id in page_ids:
            self.forget(page_id)
            blocks = self._take(self.config.frame_blocks)
            page = self._new_page(page_id, PageState.DIRTY, blocks[0], blocks[1:])
            self._own(request, page)
        self.promise(request_id, len(request.pages))

    def promise(self, request_id: str, num_pages: int) -> None:
        """Count a request with so many pages, where it was with fewer (D14)."""
        request = self._requests[request_id]
        more = max(0, num_pages - request.num_promised)
        request.num_promised += more
        self._promised_pages += more

    def adopt(self, request_id: str, page_ids: list[int]) -> None:
        """Give a request the pages that it has claimed.

        Args:
            request_id: Without pages so far; `can_start` has made room for it.
            page_ids: The pages.
        """
        if not page_ids:
            return
        request, claim = self._requests[request_id], self._claims.pop(request_id)
        assert claim.page_ids == page_ids, request_id
        self.num_host_hits += claim.num_host_hits
        self.num_device_hits += len(page_ids) - claim.num_host_hits
        if claim.start is Start.LEAN:
            self._grant_lease(request)
        self._num_sharings += 1
        for page_id in page_ids:
            page = self._pages[page_id]
            assert page.is_ready(claim.start), page_id
            del page.claims[request_id]
            self._own(request, page)

    def seal(self, request_id: str, num_pages: int) -> None:
        """Note that no step will write a request's first pages again (R3, R6)."""
        request = self._requests.get(request_id)
        if request is None or num_pages <= request.num_sealed:
            return
        for page in request.pages[request.num_sealed : num_pages]:
            self._queue(page)
        request.num_sealed = min(num_pages, len(request.pages))

    def release(self, request_id: str, published: Callable[[int], bool]) -> None:
        """Stop keeping a request's pages: it finished, was aborted or preempted.

        Args:
            request_id: The request.
            published: Whether a page can be hit by its hash. A page that can keeps
                its frame until it is clean (R7); another dirty one loses it.
        """
        request = self._requests.pop(request_id)
        self._promised_pages -= request.num_promised
        self._update.requests.pop(request_id, None)
        if request.lease is not None:
            self._blocks.give_back(request.lease.blocks)
            self._free_rows.append(request.lease.row)
        self._num_sharings += 1
        # Tail first, so that the heads of prefixes stay longest.
        for page in reversed(request.pages):
            self._count(page, -1)
            del page.owners[request_id]
            page.num_unleased -= request.lease is None
            self._count(page, 1)
            if page.owners:
                self._offer(page)
            elif page.state is PageState.DIRTY and not published(page.page_id):
                self._forget(page)
            elif page.state is not PageState.CLEAN and self._is_hopeless(page):
                self._give_up(page)
            else:
                if page.state is PageState.DIRTY:
                    self._queue(page)
                self._offer(page)

    def forget(self, page_id: int) -> None:
        """Drop what is left of a page whose place is handed out anew."""
        page = self._pages.get(page_id)
        if page is not None:
            assert not page.owners, (page_id, list(page.owners))
            assert page.transfer is None, page_id
            self._forget(page)

    def forget_all(self) -> None:
        """Drop every page, before the prefix cache is reset; nobody owns any.

        A page that is not clean loses its hash first, so that it is found by nobody
        even if the reset fails (R7).
        """
        assert not self._requests, list(self._requests)
        for request_id in list(self._claims):
            self.drop_claim(request_id)
        for page in list(self._pages.values()):
            if page.state is PageState.CLEAN:
                self._forget(page)
            else:
                self._give_up(page)

    def _grant_lease(self, request: RequestPages) -> None:
        blocks = self._take(self.config.lease_blocks)
        request.lease = HotLease(self._free_rows.pop(), blocks)
        self._changed(request).lease = request.lease
        self._num_sharings += 1
        for page in reversed(request.pages):
            page.num_unleased -= 1
            self._offer(page)

    # --- waiting requests -------------------------------------------------------

    def claim(self, request_id: str, page_ids: list[int], num_new: int) -> bool:
        """Get pages with a waiting request's prefix ready for it, asked in each step.

        It starts whole while there is room beside one lease, for what it reads would
        be copied in either case. Otherwise it starts lean, if that takes fewer blocks.
        Parts that it needs and that are on the host only are restored; nobody reads
        them before every rank has them.

        Args:
            request_id: Not known yet.
            page_ids: Pages that prefix hits have found for it now.
            num_new: Pages that it will allocate besides, at least.

        Returns:
            Whether no page has to be waited for. If so, ask `can_start`.
        """
        claim = self._claims.get(request_id)
        if claim is not None and not self._is_valid(claim, page_ids):
            self.drop_claim(request_id)
            claim = None
        if claim is None:
            start = self._choose_start(page_ids, num_new) if page_ids else None
            if start is None:
                return True
            here = map(self._pages.get, page_ids)
            num_host = sum(page is None or not page.latent_blocks for page in here)
            claim = self._claims[request_id] = Claim(page_ids, start, num_host)
        claim.turn = self._turn
        self._mark(request_id, claim)
        missing = [p for p in page_ids if not self._is_ready(p, claim.start)]
        todo = [p for p in missing if not self._has_transfer(p)]
        if missing and self._is_stalled:
            self.drop_claim(request_id)
            for page_id in missing:
                self._lose(page_id)
        elif todo:
            cost = self.cost_of_hits(todo, claim.start)
            if not self.make_room(cost, is_waiting=True):
                self.drop_claim(request_id)
                return True
            for page_id in todo[: self.config.claim_budget]:
                self._restore(page_id, claim.start)
            self._mark(request_id, claim)
        return not missing

    def _is_valid(self, claim: Claim, page_ids: list[int]) -> bool:
        """Whether a claim is still of the right pages, and can still be redeemed."""
        has_row = claim.start is Start.WHOLE or bool(self._free_rows)
        return claim.page_ids == page_ids and has_row

    @property
    def _is_stalled(self) -> bool:
        return Direction.TO_DEVICE in self.transfers.stalled

    def _mark(self, request_id: str, claim: Claim) -> None:
        """Keep what there is of claimed pages."""
        for page_id in claim.page_ids:
            page = self._pages.get(page_id)
            if page is not None and page.claims.get(request_id) is not claim.start:
                page.claims[request_id] = claim.start
                self._keep(page, latents_too=claim.start is Start.WHOLE)
                self._offer(page)

    def _is_ready(self, page_id: int, start: Start) -> bool:
        page = self._pages.get(page_id)
        return page is not None and page.is_ready(start)

    def _has_transfer(self, page_id: int) -> bool:
        page = self._pages.get(page_id)
        return page is not None and page.transfer is not None

    def can_start(self, request_id: str, page_ids: list[int], num_new: int) -> bool:
        """Make room for a request that starts now (D12, D13).

        Args:
            request_id: A running one, or a waiting one.
            page_ids: The pages that a waiting one has claimed; they are there.
            num_new: Pages that it allocates.

        Returns:
            Whether it may adopt and allocate.
        """
        new = num_new * self.config.frame_blocks
        if not page_ids:
            return self.make_room(new, request_id not in self._requests)
        claim = self._claims.get(request_id)
        if claim is None or claim.page_ids != page_ids:
            return False
        if claim.start is Start.WHOLE:
            if self.make_room(new, is_waiting=True):
                return True
            if len(page_ids) * self.config.num_stacks <= self.config.lease_blocks:
                return False
            claim.start = Start.LEAN
            self._mark(request_id, claim)
        lease = self.config.lease_blocks
        # Making room may have given the last row away.
        return self.make_room(new + lease, is_waiting=True) and bool(self._free_rows)

    def drop_claim(self, request_id: str) -> None:
        """Let a waiting request's pages go, if it has claimed any."""
        claim = self._claims.pop(request_id, None)
        if claim is None:
            return
        # Tail first, so that the heads of prefixes stay longest.
        for page_id in reversed(claim.page_ids):
            page = self._pages.get(page_id)
            if page is not None and request_id in page.claims:
                del page.claims[request_id]
                self._offer(page)

    def _choose_start(self, page_ids: list[int], num_new: int) -> Start | None:
        new = num_new * self.config.frame_blocks
        whole, lean = (new + self.cost_of_hits(page_ids, start) for start in Start)
        spare = self.config.lease_blocks if self._free_rows else 0
        is_whole = self.num_free >= whole + spare or whole <= lean
        if self._is_stalled and self._free_rows:
            is_whole = all(self._is_ready(page_id, Start.WHOLE) for page_id in page_ids)
        start = Start.WHOLE if is_whole else Start.LEAN
        # Making room takes evictable frames, maybe of these hits: then they cost
        # more, and one more turn pays for it.
        for _ in range(2):
            cost = new + self.cost_of_hits(page_ids, start)
            if not self.make_room(cost, is_waiting=True):
                return None
            if self.num_free >= new + self.cost_of_hits(page_ids, start):
                # Making room may have given the last row away.
                has_row = start is Start.WHOLE or bool(self._free_rows)
                return start if has_row else None
        return None

    def cost_of_hits(self, page_ids: Iterable[int], start: Start) -> int:
        """Free blocks that starting on these pages takes, restored parts included."""
        config = self.config
        is_lean = start is Start.LEAN
        cost = config.lease_blocks if is_lean else 0
        for page_id in page_ids:
            page = self._pages.get(page_id)
            if page is None:
                cost += 1 if is_lean else config.frame_blocks
                continue
            coming = page.transfer.restored if page.transfer else None
            has_indexer = page.indexer_block or (coming and coming.indexer_block)
            if not has_indexer or page_id in self._evictable_indexers:
                cost += 1
            has_latents = page.latent_blocks or (coming and coming.latent_blocks)
            # A lean request leaves latents evictable that are still there.
            if not has_latents or page_id in self._evictable_latents:
                cost += 0 if is_lean else config.num_stacks
        return cost

    # --- copies -----------------------------------------------------------------

    def restore_some(self) -> None:
        """Bring latents back while blocks lie idle (D13).

        Only blocks that nobody gave up a page for: a lease, and a frame for each
        request, stay free. A restored page may be evicted again at once, so this
        costs bandwidth and nothing else. Requests with the least to restore come
        first, and of a request the page that went last. Where restores fail one after
        the other or take too long, none is made that could be left out, and none of a
        page that has failed too often.
        """
        config, budget = self.config, self.config.restore_budget
        if self._is_stalled or self._failed_restores >= config.max_failures:
            return
        margin = config.lease_blocks + len(self._requests) * config.frame_blocks
        mixed = (r for r in self._requests.values() if r.host_only)
        for request in sorted(mixed, key=lambda r: len(r.host_only)):
            for page in reversed(request.host_only.values()):
                if not budget or len(self._blocks) < margin + config.num_stacks:
                    return
                if page.transfer is None and not self._has_failed(page):
                    self._restore(page.page_id, Start.WHOLE)
                    budget -= 1

    def take_update(self) -> StepUpdate:
        """Hand out everything that changed since the last call, once in each step."""
        self._turn += 1
        if Direction.TO_HOST not in self.transfers.stalled:
            for _ in range(min(self.config.write_back_budget, len(self._to_write))):
                _, page = self._to_write.popitem(last=False)
                self._issue(page)
        update, self._update = self._update, StepUpdate()
        for request_id, change in update.requests.items():
            request = self._requests[request_id]
            change.entries = [page.entry for page in request.pages[change.start :]]
            request.num_sent = len(request.pages)
        return update
