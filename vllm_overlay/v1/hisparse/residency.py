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

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from enum import Enum
from heapq import nlargest

from .messages import INDEXER_ONLY, HotLease, PageCopy, RequestUpdate, StepUpdate
from .pool import NULL_BLOCK, BlockAllocator


class PageState(Enum):
    """How the host copy of a page stands."""

    DIRTY = "dirty"  # there is none
    PENDING = "pending"  # it is under way
    CLEAN = "clean"  # it is complete, on every rank


class Place(Enum):
    """Where the latents of a running request's page are."""

    DEVICE = "device"  # the host copy is not complete
    BOTH = "both"
    HOST = "host"  # the indexers are on the device


class Start(Enum):
    """How a request begins on pages whose latents are on the host only."""

    WHOLE = "whole"  # they are restored
    LEAN = "lean"  # they stay there; it begins with a hot lease


@dataclass(eq=False)
class Page:
    """A page that has a frame; one without is clean and on the host only.

    Attributes:
        page_id: Place in the host pool.
        frame_id: Index of its frame.
        state: State of the host copy.
        indexer_block: Block of its indexers, 0 if it was given up.
        latent_blocks: Block of each stack, empty if they were given up.
        owners: Running requests that list the page, each with the page's index there.
        is_queued: Waits for its write-back to be issued.
        num_failures: Write-backs of it that failed.
        is_unsettled: An owner left before it had sealed the page.
    """

    page_id: int
    frame_id: int
    state: PageState
    indexer_block: int
    latent_blocks: tuple[int, ...]
    owners: dict[str, tuple["RequestPages", int]] = field(default_factory=dict)
    is_queued: bool = False
    num_failures: int = 0
    is_unsettled: bool = False

    @property
    def is_open(self) -> bool:
        """Whether nobody has sealed it: steps in flight may write it."""
        is_dirty = self.state is PageState.DIRTY
        return is_dirty and not self.is_queued and not self.num_failures

    @property
    def entry(self) -> int:
        """What the owners' tables say of the page (D18)."""
        return self.frame_id if self.latent_blocks else INDEXER_ONLY - self.frame_id

    @property
    def place(self) -> Place:
        """Where its latents are."""
        if self.state is not PageState.CLEAN:
            return Place.DEVICE
        return Place.BOTH if self.latent_blocks else Place.HOST


@dataclass(eq=False)
class RequestPages:
    """A running request.

    Attributes:
        pages: Its pages, in order.
        num_sealed: Leading pages that no step will write again (R6).
        num_sent: Leading pages whose frames the workers know.
        num_promised: Pages that admission counted for it.
        num_convertible: Clean pages with latents on the device, were it to hold a
            lease; an estimate where pages are shared.
        host_only: Its pages without latents on the device, by index, in the order
            in which they lost them.
        lease: The hot lease, if it holds one.
    """

    request_id: str
    num_promised: int
    pages: list[Page] = field(default_factory=list)
    num_sealed: int = 0
    num_sent: int = 0
    num_convertible: int = 0
    host_only: dict[int, Page] = field(default_factory=dict)
    lease: HotLease | None = None


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
        num_ranks: Ranks that acknowledge each write-back.
        write_back_budget: Write-backs issued in one step.
        restore_budget: Pages restored in one step because there is room.
        max_failures: Failed write-backs after which a page stays on the device, and
            steps with failed restores after which none is made that could be left out.
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
    max_failures: int = 3

    @property
    def frame_blocks(self) -> int:
        """Blocks of a whole frame."""
        return 1 + self.num_stacks

    def conversion_gain(self, num_pages: int) -> int:
        """Blocks that a decoding request of so many pages can do without."""
        mixed = num_pages + self.lease_blocks + self.tail_pages * self.frame_blocks
        return max(0, num_pages * self.frame_blocks - mixed)


def _ignore(page_id: int) -> None:
    pass


class Residency:
    """The device pool's frames and leases, and the pages in them.

    Args:
        config: Sizes.
        hold: Called when a page's host copy starts to be needed by a write-back:
            the host pool must not hand the page out (R5).
        unhold: Called when it is no longer needed.
        unpublish: Called when a page is lost that prefix hits may find (R7).

    Attributes:
        is_stalled: Whether copies under way are not waited for any more, see `stall`.
        num_failed: Write-backs that failed so far.
        num_completed: Write-backs that completed so far.
        num_lost: Pages whose restore failed so far.
    """

    def __init__(
        self,
        config: ResidencyConfig,
        hold: Callable[[int], None] = _ignore,
        unhold: Callable[[int], None] = _ignore,
        unpublish: Callable[[int], None] = _ignore,
    ) -> None:
        self.config = config
        self._hold, self._unhold, self._unpublish = hold, unhold, unpublish
        self.is_stalled = False
        self.num_failed = self.num_completed = self.num_lost = 0
        self._failed_restores = 0
        self._blocks = BlockAllocator(config.num_blocks)
        # Frame 0 is the null frame, as block 0 is the null block.
        self._free_frames = list(range(config.num_blocks - 1, 0, -1))
        self._free_rows = list(range(config.num_rows - 1, -1, -1))
        self._pages: dict[int, Page] = {}
        self._requests: dict[str, RequestPages] = {}
        # Clean parts whose blocks may be taken, least recently used first (D13).
        self._evictable_latents: OrderedDict[int, Page] = OrderedDict()
        self._evictable_indexers: OrderedDict[int, Page] = OrderedDict()
        self._to_write: deque[Page] = deque()
        self._transfers: dict[int, tuple[Page, set[int]]] = {}
        # Host pages that a copy may still write, though nobody waits for it.
        self._abandoned: dict[int, tuple[int, set[int]]] = {}
        self._next_transfer = 0
        self._promised_pages = 0
        self._num_owned = dict.fromkeys(Place, 0)
        self._update = StepUpdate()
        # Pages found by prefix hits so far, by where their latents were.
        self.num_device_hits = self.num_host_hits = 0

    # --- capacity -------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be had at once: free ones and evictable ones."""
        return (
            len(self._blocks)
            + len(self._evictable_latents) * self.config.num_stacks
            + len(self._evictable_indexers)
        )

    @property
    def num_pending(self) -> int:
        """Pages whose write-back is queued or under way."""
        return len(self._to_write) + len(self._transfers)

    @property
    def num_leases(self) -> int:
        """Requests that hold a hot lease."""
        return self.config.num_rows - len(self._free_rows)

    def num_owned(self, place: Place) -> int:
        """Pages of running requests whose latents are there."""
        return self._num_owned[place]

    def may_gain_room(self) -> bool:
        """Whether write-backs under way will make blocks available."""
        return self.num_pending > 0 and not self.is_stalled

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

    def choose_start(self, page_ids: list[int], num_new: int) -> Start | None:
        """Make room for a request that begins on pages with its prefix (D12, D13).

        It begins whole while there is room beside one lease, for what it reads would
        be copied in either case. Otherwise it begins lean, if that takes fewer blocks.

        Args:
            page_ids: Pages that it adopts.
            num_new: Pages that it allocates besides.

        Returns:
            How it must begin, or None: it does not fit now.
        """
        new = num_new * self.config.frame_blocks
        whole, lean = (new + self.cost_of_hits(page_ids, start) for start in Start)
        is_roomy = self.num_free >= whole + self.config.lease_blocks
        start = Start.WHOLE if is_roomy or whole <= lean else Start.LEAN
        # Making room takes evictable frames, maybe of these hits: then they cost
        # more, and one more turn pays for it.
        for _ in range(2):
            if not self.make_room(new + self.cost_of_hits(page_ids, start)):
                return None
            if self.num_free >= new + self.cost_of_hits(page_ids, start):
                # Making room may have given the last row away.
                has_row = start is Start.WHOLE or bool(self._free_rows)
                return start if has_row else None
        return None

    def cost_of_hits(self, page_ids: Iterable[int], start: Start = Start.WHOLE) -> int:
        """Free blocks that adopting these pages takes, restored parts included."""
        config = self.config
        is_lean = start is Start.LEAN
        cost = config.lease_blocks if is_lean else 0
        for page_id in page_ids:
            page = self._pages.get(page_id)
            if page is None:
                cost += 1 if is_lean else config.frame_blocks
                continue
            if not page.indexer_block or page_id in self._evictable_indexers:
                cost += 1
            # A lean request leaves latents evictable that are still there.
            if not page.latent_blocks or page_id in self._evictable_latents:
                cost += 0 if is_lean else config.num_stacks
        return cost

    def make_room(self, blocks: int) -> bool:
        """Make requests give pages away until so many blocks are free (D12).

        Each step takes the request whose conversion frees most; it gets its lease
        before any of its pages may go (R2). One lease more is kept free, or nobody
        could be converted; it is given up only when no write-back is under way that
        would make room.

        Returns:
            Whether the blocks may be taken now.
        """
        reserve = self.config.lease_blocks
        while self.num_free < blocks + reserve:
            request = self._best_conversion()
            if request is None:
                break
            self._grant_lease(request)
        if self.num_free >= blocks + reserve or not self._needs_reserve():
            return self.num_free >= blocks
        return self.num_free >= blocks and not self.may_gain_room()

    def _needs_reserve(self) -> bool:
        """Whether a request without a lease has more to give than a lease takes."""
        stacks, lease = self.config.num_stacks, self.config.lease_blocks
        return any(
            r.lease is None and len(r.pages) * stacks > lease
            for r in self._requests.values()
        )

    def _best_conversion(self) -> RequestPages | None:
        config = self.config
        if not self._free_rows or self.num_free < config.lease_blocks:
            return None
        candidates = (r for r in self._requests.values() if r.lease is None)
        best = max(candidates, key=lambda r: r.num_convertible, default=None)
        if best is None:
            return None
        gain = best.num_convertible * config.num_stacks - config.lease_blocks
        return best if gain > 0 else None

    # --- requests -------------------------------------------------------------

    def add_request(self, request_id: str, num_promised: int) -> None:
        """Start to keep a request's pages.

        Args:
            request_id: Not known yet, or released.
            num_promised: Pages that it will want, as far as admission knows.
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

    def adopt(
        self, request_id: str, page_ids: list[int], start: Start = Start.WHOLE
    ) -> None:
        """Give a request pages that hold its prefix already.

        Frames that are still there are taken over; missing parts are restored from
        the host before the step's forward, latents only for a request that begins
        whole.

        Args:
            request_id: Without pages so far.
            page_ids: The pages.
            start: What `choose_start` has made room for.
        """
        request = self._requests[request_id]
        is_lean = start is Start.LEAN
        # All hits first: allocating for one must not evict the next.
        hits = [self._pages.get(page_id) for page_id in page_ids]
        for page in hits:
            if page is not None:
                self._evictable_indexers.pop(page.page_id, None)
                if not is_lean:
                    self._evictable_latents.pop(page.page_id, None)
        if is_lean:
            self._grant_lease(request)
        for page_id, page in zip(page_ids, hits):
            if page is None:
                page = self._new_page(page_id, PageState.CLEAN, NULL_BLOCK, ())
            self.num_device_hits += bool(page.latent_blocks)
            self.num_host_hits += not page.latent_blocks
            self._restore_missing(page, latents_too=not is_lean)
            self._own(request, page)

    def restore_some(self) -> None:
        """Bring latents back while blocks lie idle (D13).

        Only blocks that nobody gave up a page for: a lease, and a frame for each
        request, stay free. A restored page may be evicted again at once, so this
        costs bandwidth and nothing else. Requests with the least to restore come
        first, and of a request the page that went last. Where restores fail again and
        again, none is made that could be left out: requests must get on.
        """
        config, budget = self.config, self.config.restore_budget
        if self._failed_restores >= config.max_failures:
            return
        margin = config.lease_blocks + len(self._requests) * config.frame_blocks
        mixed = (r for r in self._requests.values() if r.host_only)
        for request in sorted(mixed, key=lambda r: len(r.host_only)):
            while request.host_only:
                if not budget or len(self._blocks) < margin + config.num_stacks:
                    return
                page = next(reversed(request.host_only.values()))
                self._restore_missing(page)
                self._offer(page)
                budget -= 1

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
        # Tail first, so that the heads of prefixes stay longest.
        for page in reversed(request.pages):
            self._count(page, -1)
            del page.owners[request_id]
            self._count(page, 1)
            if page.owners:
                self._offer(page)
            elif page.state is PageState.DIRTY and not published(page.page_id):
                self._cancel(page)
                self._drop(page)
            elif page.state is not PageState.CLEAN and self._is_hopeless(page):
                self._give_up(page)
            else:
                page.is_unsettled |= page.is_open
                if page.state is PageState.DIRTY:
                    self._queue(page)
                self._offer(page)

    def _has_failed(self, page: Page) -> bool:
        """Whether a page cannot be written back, however often it is tried."""
        return page.num_failures >= self.config.max_failures

    def _is_hopeless(self, page: Page) -> bool:
        return self.is_stalled or self._has_failed(page)

    def _give_up(self, page: Page) -> None:
        """Forget a page that nobody owns and that does not get to the host.

        A copy of it may still be under way: the host page stays held until it ends.
        """
        self._cancel(page)
        if page.state is PageState.PENDING:
            pending = self._transfers.items()
            transfer_id = next(t for t, (own, _) in pending if own is page)
            _, done = self._transfers.pop(transfer_id)
            self._abandoned[transfer_id] = (page.page_id, done)
            page.state = PageState.DIRTY
        self._unpublish(page.page_id)
        self._drop(page)

    def forget(self, page_id: int) -> None:
        """Drop what is left of a page whose place is handed out anew."""
        page = self._pages.get(page_id)
        if page is not None:
            assert not page.owners, (page_id, list(page.owners))
            assert page.state is not PageState.PENDING, page_id
            self._cancel(page)
            self._drop(page)

    def forget_all(self) -> None:
        """Drop every page, before the prefix cache is reset; nobody owns any.

        A page that is not clean loses its hash first, so that it is found by nobody
        even if the reset fails (R7).
        """
        assert not self._requests, list(self._requests)
        for page in list(self._pages.values()):
            if page.state is PageState.CLEAN:
                self._drop(page)
            else:
                self._give_up(page)

    @property
    def abandoned_pages(self) -> list[int]:
        """Host pages that a copy may still write, though nobody waits for it."""
        return [page_id for page_id, _ in self._abandoned.values()]

    # --- copies ---------------------------------------------------------------

    def acknowledge(self, transfer_id: int, ranks: Iterable[int]) -> bool:
        """Note that ranks completed a write-back; unknown transfers are ignored.

        Returns:
            Whether the page is clean now (R1: on every rank).
        """
        if transfer_id in self._abandoned:
            page_id, done = self._abandoned[transfer_id]
            done.update(ranks)
            if len(done) == self.config.num_ranks:
                self._end_abandoned(transfer_id)
        if transfer_id not in self._transfers:
            return False
        page, done = self._transfers[transfer_id]
        done.update(ranks)
        if len(done) < self.config.num_ranks:
            return False
        del self._transfers[transfer_id]
        self._count(page, -1)
        page.state = PageState.CLEAN
        self._count(page, 1)
        for owner, _ in page.owners.values():
            owner.num_convertible += 1
        self.num_completed += 1
        self._offer(page)
        self._unhold(page.page_id)
        return True

    def fail(self, transfer_id: int) -> None:
        """Note that a rank could not complete a write-back; unknown ones are ignored.

        It is tried again. A page that fails too often stays on the device as long as
        it has an owner, and is forgotten then.
        """
        self._end_abandoned(transfer_id)
        page, _ = self._transfers.pop(transfer_id, (None, None))
        if page is None:
            return
        self.num_failed += 1
        page.num_failures += 1
        self._count(page, -1)
        page.state = PageState.DIRTY
        self._count(page, 1)
        self._unhold(page.page_id)
        if not self._has_failed(page):
            self._queue(page)
        elif not page.owners:
            self._give_up(page)

    def _end_abandoned(self, transfer_id: int) -> None:
        if transfer_id in self._abandoned:
            page_id, _ = self._abandoned.pop(transfer_id)
            self.num_completed += 1
            self._unhold(page_id)

    def stall(self) -> None:
        """Stop waiting for the copies under way; there is a clock outside.

        Pages that nobody owns are given up now, others when their owners leave. It
        is over when the caller sets `is_stalled` back.
        """
        self.is_stalled = True
        for page in self._not_clean():
            if not page.owners:
                self._give_up(page)

    def _not_clean(self) -> list[Page]:
        return [p for p in self._pages.values() if p.state is not PageState.CLEAN]

    def spoil(self, page_ids: Iterable[int], running: Set[str]) -> set[str]:
        """Find out who computed with bytes that were not there: restores failed.

        What these requests wrote since is wrong, and so is what others computed from
        it. Such pages are found by nobody any more (R7). A page that its writer left
        before it was sealed counts as wrong: who wrote it is not known any more.

        Args:
            page_ids: Pages whose restore failed.
            running: Requests with steps in flight.

        Returns:
            The requests; the caller must release them, and call `lose` then.
        """
        self.num_lost += len(set(page_ids))
        self._failed_restores += 1
        late = [page for page in self._not_clean() if page.is_unsettled]
        wrong = [self._pages[p] for p in page_ids if p in self._pages] + late
        requests: set[str] = set()
        while wrong:
            page = wrong.pop()
            self._unpublish(page.page_id)
            for name in (page.owners.keys() & running) - requests:
                requests.add(name)
                owner, _ = page.owners[name]
                wrong += [p for p in owner.pages[owner.num_sealed :] if p.is_open]
        for page in late:
            if not page.owners:
                self._give_up(page)
        return requests

    def lose(self, page_ids: Iterable[int]) -> None:
        """Drop what pages have on the device: their restore failed.

        Only requests that were not running may still own them. Each holds a lease: the
        page was without latents when it had it already (R2).
        """
        for page_id in page_ids:
            page = self._pages.get(page_id)
            if page is None or page.state is not PageState.CLEAN:
                continue
            if not page.owners:
                self._drop(page)
            elif self._evictable_latents.pop(page_id, None) is not None:
                self._lose_latents(page)

    def take_update(self) -> StepUpdate:
        """Hand out everything that changed since the last call."""
        for _ in range(min(self.config.write_back_budget, len(self._to_write))):
            self._issue(self._to_write.popleft())
        update, self._update = self._update, StepUpdate()
        update.restores = [
            copy for r in update.restores if (copy := self._still_wanted(r))
        ]
        for request_id, change in update.requests.items():
            request = self._requests[request_id]
            change.entries = [page.entry for page in request.pages[change.start :]]
            request.num_sent = len(request.pages)
        return update

    def _still_wanted(self, copy: PageCopy) -> PageCopy | None:
        """A restore without the parts that were lost again in the same step.

        Their blocks may be the target of another restore, and copies of one step
        have no order.
        """
        page = self._pages.get(copy.page_id)
        if page is None:
            return None
        indexer = copy.indexer_block
        latents = copy.latent_blocks
        if indexer != page.indexer_block:
            indexer = NULL_BLOCK
        if latents != page.latent_blocks:
            latents = ()
        if not indexer and not latents:
            return None
        return PageCopy(copy.transfer_id, copy.page_id, indexer, latents)

    def _issue(self, page: Page) -> None:
        page.is_queued = False
        page.state = PageState.PENDING
        transfer_id = self._next_transfer
        self._next_transfer += 1
        self._transfers[transfer_id] = (page, set())
        self._update.write_backs.append(
            PageCopy(transfer_id, page.page_id, page.indexer_block, page.latent_blocks)
        )

    def _queue(self, page: Page) -> None:
        is_dirty = page.state is PageState.DIRTY
        if is_dirty and not page.is_queued and not self._has_failed(page):
            page.is_queued = True
            self._to_write.append(page)
            self._hold(page.page_id)

    def _cancel(self, page: Page) -> None:
        if page.is_queued:
            page.is_queued = False
            self._to_write.remove(page)
            self._unhold(page.page_id)

    # --- frames ---------------------------------------------------------------

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

    def _own(self, request: RequestPages, page: Page) -> None:
        assert request.request_id not in page.owners, page.page_id
        self._count(page, -1)
        page.owners[request.request_id] = (request, len(request.pages))
        self._count(page, 1)
        request.pages.append(page)
        if not page.latent_blocks:
            request.host_only[len(request.pages) - 1] = page
        elif page.state is PageState.CLEAN:
            request.num_convertible += 1
        self._offer(page)
        self._changed(request)

    def _changed(self, request: RequestPages) -> RequestUpdate:
        return self._update.requests.setdefault(
            request.request_id, RequestUpdate(start=request.num_sent)
        )

    def _restore_missing(self, page: Page, latents_too: bool = True) -> None:
        indexer: tuple[int, ...] = ()
        latents: tuple[int, ...] = ()
        if not page.indexer_block:
            indexer = self._take(1)
            page.indexer_block = indexer[0]
        if not page.latent_blocks and latents_too:
            latents = self._take(self.config.num_stacks)
            self._count(page, -1)
            page.latent_blocks = latents
            self._count(page, 1)
            for owner, index in page.owners.values():
                owner.num_convertible += 1
                del owner.host_only[index]
        if indexer or latents:
            assert page.state is PageState.CLEAN, page.page_id
            self._frame_changed(page)
            block = indexer[0] if indexer else NULL_BLOCK
            self._update.restores.append(PageCopy(-1, page.page_id, block, latents))

    def _offer(self, page: Page) -> None:
        """Make evictable what may go: R1 (clean), R2 (every owner has its lease)."""
        if page.state is not PageState.CLEAN:
            return
        leased = all(owner.lease is not None for owner, _ in page.owners.values())
        if page.latent_blocks and leased:
            self._evictable_latents[page.page_id] = page
        if page.indexer_block and not page.owners:
            self._evictable_indexers[page.page_id] = page

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

    def _lose_latents(self, page: Page) -> None:
        self._blocks.give_back(page.latent_blocks)
        self._count(page, -1)
        page.latent_blocks = ()
        self._count(page, 1)
        for owner, index in page.owners.values():
            owner.num_convertible -= 1
            owner.host_only[index] = page
        self._frame_changed(page)

    def _lose_indexer(self, page: Page) -> None:
        self._blocks.give_back((page.indexer_block,))
        page.indexer_block = NULL_BLOCK
        self._frame_changed(page)

    def _drop(self, page: Page) -> None:
        """Take a page's frame away; its host copy, if any, is all that is left."""
        assert not page.owners and not page.is_queued, page.page_id
        self._evictable_latents.pop(page.page_id, None)
        self._evictable_indexers.pop(page.page_id, None)
        if page.latent_blocks:
            self._lose_latents(page)
        if page.indexer_block:
            self._lose_indexer(page)
        self._free_frames.append(page.frame_id)
        del self._pages[page.page_id]

    def _grant_lease(self, request: RequestPages) -> None:
        blocks = self._take(self.config.lease_blocks)
        request.lease = HotLease(self._free_rows.pop(), blocks)
        self._changed(request).lease = request.lease
        for page in reversed(request.pages):
            self._offer(page)
