# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The residency core against a model that moves bytes.

A toy host pool hands out and caches pages; a toy worker applies the updates to a
device of labelled blocks, copies late and in any order, and after each step reads
every page of every running request wherever the tables say it is. Whatever rule is
broken, a read finds another label.
"""

import os
from collections import OrderedDict
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from hisparse import (
    INDEXER_ONLY,
    HotLease,
    PageCopy,
    Residency,
    ResidencyConfig,
    check_integrity,
)

STACKS = 2
LEASE = 4
NUM_BLOCKS = 40
HOST_PAGES = 24
NULL = 0
GARBAGE = "garbage"

# The operations are the product: 5,000 in CI, 100,000 in the nightly profile.
NIGHTLY = os.environ.get("HISPARSE_NIGHTLY") == "1"
EXAMPLES = 2_000 if NIGHTLY else 100
STEPS = 50
SHRINKS = os.environ.get("HISPARSE_NO_SHRINKING") != "1"


@dataclass
class HostPage:
    """A place in the host pool: what was written there, who references it."""

    references: int = 0
    content: object = None
    name: object = None  # what a prefix hit finds it by


class HostPool:
    """vLLM's block pool in small: references, hashes, least recently used first."""

    def __init__(self) -> None:
        self.pages = [HostPage() for _ in range(HOST_PAGES)]
        self.free = OrderedDict.fromkeys(range(1, HOST_PAGES))

    def take(self, count: int) -> list[int]:
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for page in taken:
            self.pages[page].name = None
            self.pages[page].references = 1
        return taken

    def reference(self, page: int) -> None:
        self.free.pop(page, None)
        self.pages[page].references += 1

    def unreference(self, page: int) -> None:
        self.pages[page].references -= 1
        assert self.pages[page].references >= 0
        if not self.pages[page].references:
            self.free[page] = None


@dataclass
class Running:
    """A request as scheduler and worker see it."""

    names: list = field(default_factory=list)  # of all its pages
    pages: list[int] = field(default_factory=list)
    num_full: int = 0
    # what the worker knows
    entries: list[int] = field(default_factory=list)
    lease: HotLease | None = None


def blocks_of(copy: PageCopy) -> list[int]:
    """The device blocks that a copy reads or fills."""
    blocks = (copy.indexer_block, *copy.latent_blocks)
    return [block for block in blocks if block != NULL]


class ResidencyMachine(RuleBasedStateMachine):
    """Random traffic over a device pool that is always short."""

    def __init__(self) -> None:
        super().__init__()
        self.host = HostPool()
        config = ResidencyConfig(
            num_blocks=NUM_BLOCKS,
            num_stacks=STACKS,
            lease_blocks=LEASE,
            num_rows=3,
            tail_pages=1,
            num_ranks=2,
            write_back_budget=3,
            max_failures=2,
        )
        self.core = Residency(
            config, self.host.reference, self.host.unreference, self.unpublish
        )
        self.requests: dict[str, Running] = {}
        self.device: dict[int, object] = {}
        self.frames: dict[int, tuple[int, ...]] = {}
        # Copies under way: which, whether to the device, ranks that have ended it.
        self.copies: dict[int, tuple[PageCopy, bool, set[int]]] = {}
        self.bad: set[int] = set()  # of these, what some rank could not complete
        self.waiting: dict[str, tuple[int, int]] = {}
        self.counter = 0

    # --- the toy scheduler --------------------------------------------------

    def unpublish(self, page: int) -> None:
        self.host.pages[page].name = None

    def allocate(self, request_id: str, count: int) -> bool:
        cost = count * (1 + STACKS)
        if len(self.host.free) < count or not self.core.make_room(cost):
            return False
        self.take_pages(request_id, count)
        return True

    def take_pages(self, request_id: str, count: int) -> None:
        request = self.requests[request_id]
        pages = self.host.take(count)
        self.core.append(request_id, pages)
        request.pages += pages

    @precondition(lambda self: len(self.waiting) < 3)
    @rule(prefix=st.integers(0, 1), length=st.integers(2, 9))
    def submit(self, prefix: int, length: int) -> None:
        self.counter += 1
        self.waiting[f"r{self.counter}"] = (prefix, length)
        self.admit()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort_waiting(self, data) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[request_id]
        self.core.drop_claim(request_id)

    @rule()
    def admit(self) -> None:
        """As the scheduler does: in order, until one does not fit."""
        for request_id, (prefix, length) in list(self.waiting.items()):
            names = [(prefix, i) for i in range(length)]
            by_name = {p.name: i for i, p in enumerate(self.host.pages) if p.name}
            hits = []
            for name in names[: length - 1]:
                if name not in by_name:
                    break
                hits.append(by_name[name])
            known = hits if self.core.can_admit(length) else []
            if not self.core.claim(request_id, known, 1):
                continue
            if not self.admit_now(request_id, names, hits):
                break

    def admit_now(self, request_id: str, names: list, hits: list[int]) -> bool:
        length = len(names)
        fresh = length - len(hits)
        free_hits = sum(page in self.host.free for page in hits)
        if len(self.host.free) - free_hits < fresh or not self.core.can_admit(length):
            return False
        if not self.core.can_start(request_id, hits, fresh):
            return False
        del self.waiting[request_id]
        self.requests[request_id] = Running(names)
        for page in hits:
            self.host.reference(page)
        self.core.add_request(request_id, length)
        self.core.adopt(request_id, hits)
        self.requests[request_id].pages += hits
        self.requests[request_id].num_full = len(hits)
        self.take_pages(request_id, fresh)
        # As in vLLM, a full page can be hit from its allocation on.
        for name, page in zip(names[:-1], self.requests[request_id].pages):
            self.host.pages[page].name = name
        return True

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 3))
    def grow(self, data, count: int) -> None:
        self.grow_by(data.draw(st.sampled_from(sorted(self.requests))), count)

    def grow_by(self, request_id: str, count: int) -> None:
        if self.allocate(request_id, count):
            names = self.requests[request_id].names
            names += [(request_id, i) for i in range(len(names), len(names) + count)]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def seal(self, data) -> None:
        self.seal_written(data.draw(st.sampled_from(sorted(self.requests))))

    def seal_written(self, request_id: str) -> None:
        """All pages that the worker has written, but the last, are settled."""
        request = self.requests[request_id]
        settled = max(0, min(len(request.entries), len(request.pages)) - 1)
        self.core.seal(request_id, settled)
        request.num_full = max(request.num_full, settled)
        for name, page in zip(request.names[:settled], request.pages):
            self.host.pages[page].name = self.host.pages[page].name or name

    @rule()
    def work(self) -> None:
        """What a serving engine does most: every request takes a step."""
        for request_id in sorted(self.requests):
            self.seal_written(request_id)
            self.grow_by(request_id, 1)
        self.admit()
        self.step()
        for transfer in sorted(self.copies)[:6]:
            self.complete_all(transfer)

    @precondition(lambda self: len(self.requests) > 1)
    @rule(data=st.data())
    def leave(self, data) -> None:
        """Finished, aborted or preempted: the core sees the same."""
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        request = self.requests[request_id]
        unwritten = request.pages[len(request.entries) :]
        if any(self.host.pages[page].references > 1 for page in unwritten):
            return  # a request is not taken away between its scheduling and its step
        del self.requests[request_id]
        written = set(request.pages[: len(request.entries)])
        for page in request.pages:
            # What was never written cannot be hit later.
            if page not in written and self.host.pages[page].references == 1:
                self.host.pages[page].name = None
        self.core.release(request_id, lambda p: self.host.pages[p].name is not None)
        for page in reversed(request.pages):
            self.host.unreference(page)

    @rule()
    def restore(self) -> None:
        before = [
            (name, request.lease) for name, request in self.core._requests.items()
        ]
        evictable = self.core.num_free - len(self.core._blocks)
        blocks = len(self.core._blocks)
        self.core.restore_some()
        # It takes only what lies idle.
        assert self.core.num_free - len(self.core._blocks) == evictable
        assert len(self.core._blocks) >= min(blocks, LEASE)
        after = [(name, request.lease) for name, request in self.core._requests.items()]
        assert before == after

    @rule()
    def squeeze(self) -> None:
        """Take all that may go, and leave it idle: or little would be restored."""
        self.core._blocks.give_back(self.core._take(self.core.num_free))

    @precondition(lambda self: self.counter % 4 == 3 and not self.requests)
    @rule()
    def reset_cache(self) -> None:
        """All or nothing, as in vLLM: it is refused while anybody runs."""
        self.core.forget_all()
        held = set(self.core.abandoned_pages)
        for place, page in enumerate(self.host.pages):
            assert bool(page.references) == (place in held)
            page.name = None

    # --- the toy worker -----------------------------------------------------

    @rule()
    def step(self) -> None:
        """Apply an update, let the forward write, and read."""
        update = self.core.take_update()
        self.frames.update(update.frames)
        for request_id, change in update.requests.items():
            request = self.requests[request_id]
            if change.start == 0:
                request.entries, request.lease = [], None
            assert len(request.entries) == change.start
            for index, entry in change.changed.items():
                request.entries[index] = entry
            request.entries += change.entries
            request.lease = change.lease or request.lease
            assert len(request.entries) == len(request.pages)
        for copy in update.restores:
            self.copies[copy.transfer_id] = (copy, True, set())
            for block in blocks_of(copy):
                self.device[block] = GARBAGE
        for copy in update.write_backs:
            assert copy.indexer_block and len(copy.latent_blocks) == STACKS
            self.copies[copy.transfer_id] = (copy, False, set())
        targets = [
            b for c, is_in, _ in self.copies.values() if is_in for b in blocks_of(c)
        ]
        assert len(targets) == len(set(targets)), "two restores into one block"
        under_way = {transfer.copy.transfer_id for transfer in self.core.transfers}
        assert under_way == set(self.copies), "a copy that the worker does not know of"
        self.write_new_pages(update)
        self.read_everything()
        self.find_everything()

    def find_everything(self) -> None:
        """What a prefix hit would find is what it is named by."""
        for page_id, page in self.core._pages.items():
            name = self.host.pages[page_id].name
            blocks = (page.indexer_block, *page.latent_blocks)
            if name is not None:
                assert {self.device[b] for b in blocks if b} <= {name}, name

    def write_new_pages(self, update) -> None:
        """The forward writes the pages that are not a copy of anything."""
        for request_id, change in update.requests.items():
            request = self.requests[request_id]
            for i in range(max(change.start, request.num_full), len(request.entries)):
                for block in self.frames[request.entries[i]]:
                    assert block != NULL
                    self.device[block] = request.names[i]
            request.num_full = max(request.num_full, len(request.entries) - 1)

    def read_everything(self) -> None:
        """Each page of each request, where the tables say it is."""
        for request in self.requests.values():
            triples = zip(request.names, request.pages, request.entries)
            for name, page, entry in triples:
                resident = entry >= 0
                frame = entry if resident else INDEXER_ONLY - entry
                indexer, *latents = self.frames[frame]
                assert self.device[indexer] == name
                if resident:
                    assert [self.device[block] for block in latents] == [name] * STACKS
                else:
                    assert request.lease is not None
                    assert self.host.pages[page].content == name

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), rank=st.integers(0, 1))
    def complete(self, data, rank: int) -> None:
        self.complete_rank(data.draw(st.sampled_from(sorted(self.copies))), rank)

    def complete_all(self, transfer: int) -> None:
        for rank in {0, 1} - self.copies[transfer][2]:
            self.complete_rank(transfer, rank)

    def complete_rank(self, transfer: int, rank: int, has_failed: bool = False) -> None:
        """A rank's copy ends; the bytes move only when the last one does."""
        copy, is_restore, ended = self.copies[transfer]
        if rank in ended:
            return
        ended.add(rank)
        self.bad |= {transfer} if has_failed else set()
        is_over = len(ended) == 2
        (own,) = [t for t in self.core.transfers if t.copy.transfer_id == transfer]
        is_used = is_over and transfer not in self.bad and not own.is_abandoned
        host = self.host.pages[copy.page_id]
        assert host.references > 0
        if is_over and is_restore:
            for block in blocks_of(copy):
                self.device[block] = host.content if is_used else GARBAGE
        elif is_over:
            contents = {self.device[block] for block in blocks_of(copy)}
            assert len(contents) == 1 or not is_used, contents
            # What others write is anything, where nobody reads.
            host.content = contents.pop() if is_used else GARBAGE
        if is_over:
            del self.copies[transfer]
        assert self.core.acknowledge(transfer, [rank], has_failed) == is_used

    @precondition(lambda self: self.copies and self.counter % 4 == 1)
    @rule(data=st.data(), rank=st.integers(0, 1))
    def fail(self, data, rank: int) -> None:
        """A rank could not copy; the other may still be copying."""
        transfer = data.draw(st.sampled_from(sorted(self.copies)))
        self.complete_rank(transfer, rank, has_failed=True)

    @precondition(lambda self: self.copies and self.counter % 4 == 0)
    @rule(data=st.data())
    def give_up_overdue(self, data) -> None:
        """Copies may still write when all believe them dead."""
        before = data.draw(st.sampled_from(sorted(self.copies))) + 1
        self.core.give_up_overdue(before)

    @precondition(lambda self: self.counter % 4 == 2)
    @rule(transfer=st.integers(0, 10_000))
    def stray_acknowledgement(self, transfer: int) -> None:
        if transfer not in [t.copy.transfer_id for t in self.core.transfers]:
            assert not self.core.acknowledge(transfer, [0, 1])

    @invariant()
    def books_balance(self) -> None:
        check_integrity(self.core)

    def teardown(self) -> None:
        """When all have left and all copies are done, nothing is left held."""
        for request_id in sorted(self.requests):
            request = self.requests.pop(request_id)
            self.core.release(request_id, lambda page: False)
            for page in request.pages:
                self.host.unreference(page)
        for request_id in list(self.waiting):
            self.core.drop_claim(request_id)
        for _ in range(HOST_PAGES):
            self.core.take_update()
            for transfer in list(self.core.transfers):
                self.core.acknowledge(transfer.copy.transfer_id, [0, 1])
        check_integrity(self.core)
        assert self.core.num_free == NUM_BLOCKS - 1
        assert self.core.num_pending == 0
        assert all(page.references == 0 for page in self.host.pages)


TestResidency = ResidencyMachine.TestCase
TestResidency.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    # The same operations in each run of CI, new ones each night.
    derandomize=not NIGHTLY,
    suppress_health_check=list(HealthCheck),
    phases=[phase for phase in Phase if SHRINKS or phase is not Phase.shrink],
)
