# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Single behaviours of the residency core; traffic is in `test_residency_model`."""

import time
from random import Random

import pytest
from hisparse_core.pool import BlockAllocator

from hisparse import (
    INDEXER_ONLY,
    Direction,
    PageCopy,
    PageState,
    Place,
    Residency,
    ResidencyConfig,
    Start,
    check_integrity,
)

STACKS, LEASE = 2, 4


def make(num_blocks: int = 40, **sizes: int) -> Residency:
    sizes = {"num_stacks": STACKS, "lease_blocks": LEASE, "num_rows": 4, **sizes}
    return Residency(ResidencyConfig(num_blocks=num_blocks, **sizes))


def run_pages(core: Residency, request: str, pages: range, sealed: int) -> list[int]:
    """Admit a request and seal its first pages; returns the open transfers."""
    core.add_request(request, len(pages))
    core.append(request, pages)
    core.take_update()
    core.seal(request, sealed)
    return [copy.transfer_id for copy in core.take_update().write_backs]


def test_block_freed_twice_is_found() -> None:
    pool = BlockAllocator(4)
    blocks = pool.take(2)
    pool.give_back(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.give_back(blocks[:1])


def test_blocks_free_for_longest_are_taken_first() -> None:
    pool = BlockAllocator(5)
    first = pool.take(2)
    pool.give_back(reversed(first))
    assert pool.take(4) == (3, 4, 2, 1)


def test_sealed_pages_are_written_back_once_each() -> None:
    core = make()
    assert len(run_pages(core, "a", range(1, 6), 3)) == 3
    core.seal("a", 4)
    core.seal("a", 2)
    (copy,) = core.take_update().write_backs
    assert copy.page_id == 4
    assert len(copy.latent_blocks) == STACKS


def test_no_room_without_clean_pages() -> None:
    """Requested is not held, pending is not clean."""
    core = make(40)
    transfers = run_pages(core, "a", range(1, 13), 10)
    assert core.num_free == 3
    assert not core.make_room(LEASE)
    for transfer in transfers:
        core.acknowledge(transfer, [0])
    # A lease does not fit into three blocks any more: the reserve was used up.
    assert not core.make_room(LEASE)
    check_integrity(core)


def test_lease_comes_before_pages_go_and_tail_goes_first() -> None:
    core = make(60)
    for transfer in run_pages(core, "a", range(1, 13), 10):
        core.acknowledge(transfer, [0])
    assert core.num_free == 59 - 36
    assert core.make_room(26)
    core.add_request("b", 8)
    core.append("b", range(20, 28))
    update = core.take_update()
    change = update.requests["a"]
    assert change.lease is not None and len(change.lease.blocks) == LEASE
    assert sorted(change.changed) == list(range(10 - len(change.changed), 10))
    assert all(entry <= INDEXER_ONLY for entry in change.changed.values())
    check_integrity(core)


def test_pages_of_running_requests_are_counted_by_place() -> None:
    """On the device only, on both, on the host only, and back."""
    core = make(60)

    def counts() -> tuple[int, ...]:
        return tuple(core.num_owned(place) for place in Place)

    transfers = run_pages(core, "a", range(1, 13), 10)
    assert counts() == (12, 0, 0)
    for transfer in transfers:
        core.acknowledge(transfer, [0])
    assert counts() == (2, 10, 0)
    assert core.make_room(26)
    core.add_request("b", 8)
    core.append("b", range(20, 28))
    gone = len(core.take_update().requests["a"].changed)
    assert gone > 0 and counts() == (10, 10 - gone, gone)
    core.release("b", lambda page_id: False)
    assert counts() == (2, 10 - gone, gone)
    core.release("a", lambda page_id: True)
    assert counts() == (0, 0, 0)
    assert start(core, list(range(1, 11)), new=0) is Start.WHOLE
    assert counts() == (0, 10, 0)
    check_integrity(core)


def test_no_lease_is_kept_in_reserve_that_nobody_can_get() -> None:
    """There is no row of hot state; or those who have none would gain nothing."""
    for num_rows, pages in ((0, 12), (1, 2)):
        core = make(3 * pages + 4, num_rows=num_rows)
        run_pages(core, "a", range(1, pages + 1), pages - 1)
        assert core.num_free == 3 and core.may_gain_room()
        assert core.make_room(3), num_rows


def share(core: Residency, shared: int, owners: dict[str, int]) -> None:
    """Let requests have pages in common, and so many of their own; all are clean."""
    first, hits = shared + 1, list(range(1, shared + 1))
    for name, own in owners.items():
        if not core._requests:
            run_pages(core, name, range(1, shared + 1), 0)
        else:
            assert core.claim(name, hits, own) and core.can_start(name, hits, own)
            core.add_request(name, shared + own)
            core.adopt(name, hits)
        core.append(name, range(first, first + own))
        first += own
        core.seal(name, shared + own)
        for copy in core.take_update().write_backs:
            core.acknowledge(copy.transfer_id, [0])
    check_integrity(core)


def test_requests_that_can_free_pages_only_together_are_converted_together() -> None:
    core = make(100)
    share(core, 20, dict.fromkeys("abc", 2))
    # Alone each would get back the four blocks of its lease at most.
    assert core.num_free == 99 - 60 - 18
    assert core.make_room(40)
    assert core.num_leases == 3 and core.num_free == 21 + 2 * 26 - 3 * LEASE
    check_integrity(core)


def test_requests_whose_leases_would_take_more_than_they_free_are_not_converted() -> (
    None
):
    core = make(100, num_rows=9)
    share(core, 8, dict.fromkeys("abcdefgh", 1))
    free = core.num_free
    assert free == 99 - 24 - 24
    # There is room, though not for another lease beside it.
    assert core.make_room(free) and core.num_free == free
    assert not core.make_room(free + 1)
    assert not core.num_leases
    check_integrity(core)


def test_a_lease_makes_shared_pages_worth_more_to_the_others() -> None:
    core = make(60)
    share(core, 3, {"a": 10, "b": 0})
    assert core.num_free == 59 - 9 - 30
    # The lease of b takes more than its half of the pages, and less than all of them.
    assert core.make_room(20 + 2 * 13 - 2 * LEASE - LEASE)
    assert core.num_leases == 2
    check_integrity(core)


def test_shared_page_stays_while_one_owner_has_no_lease() -> None:
    core = make(80)
    for transfer in run_pages(core, "a", range(1, 13), 12):
        core.acknowledge(transfer, [0])
    start(core, [1, 2, 3, 4], new=2)
    core.take_update()
    core.make_room(core.num_free + 2 * STACKS)
    held = [p for p in core._pages.values() if "b" in p.owners]
    assert core._requests["b"].lease is None and core._requests["a"].lease
    assert not any(p.page_id in core._evictable_latents for p in held)
    check_integrity(core)


def test_a_long_queue_of_write_backs_is_cancelled_fast() -> None:
    """As when copies stall: a million tokens once took two seconds of a step."""
    core = make(num_blocks=60_000, write_back_budget=0)
    run_pages(core, "a", range(1, 16_385), 16_384)
    assert core.num_pending == 16_384
    start = time.thread_time()
    core.release("a", lambda page: False)
    assert time.thread_time() - start < 0.5 and not core.num_pending


def test_published_page_can_be_hit_before_it_is_clean() -> None:
    core = make()
    run_pages(core, "a", range(1, 5), 0)
    core.release("a", lambda page: page < 4)
    assert core.num_pending == 3
    assert core.claim("b", [1, 2, 3], 1) and core.can_start("b", [1, 2, 3], 1)
    core.add_request("b", 4)
    core.adopt("b", [1, 2, 3])
    assert not core.take_update().restores
    assert all(core._pages[p].state is PageState.PENDING for p in (1, 2, 3))
    check_integrity(core)


def test_admission_counts_steady_state_and_one_window() -> None:
    core = make(100, window_pages=5)
    assert core.can_admit(1_000)  # alone, whatever start-up allowed
    core.add_request("a", 20)
    core.append("a", range(1, 21))
    # 20 pages: 20 indexers, the lease, two tail frames: 30 blocks at steady state.
    assert core.config.conversion_gain(20) == 20 * 3 - 30
    assert core.can_admit(20)
    assert core.can_admit(49)
    assert not core.can_admit(50)


def test_admission_counts_no_more_conversions_than_there_are_rows() -> None:
    core = make(150, num_rows=2)
    for name in "ab":
        core.add_request(name, 20)
    # Two of them at steady state take 60 blocks, and one that stays whole 60 more.
    assert core.can_admit(20)
    core.add_request("c", 20)
    assert not core.can_admit(20)
    # A row counts for who holds it, the free ones for those that gain most.
    core.release("b", lambda page: False)
    core._grant_lease(core._requests["c"])
    assert core.can_admit(20)
    core._grant_lease(core._requests["a"])
    assert not core.can_admit(45)
    core.release("c", lambda page: False)
    assert core.can_admit(45)


def test_a_request_that_outgrows_its_promise_counts_with_what_it_has() -> None:
    core = make(100, window_pages=5)
    core.add_request("a", 20)
    core.append("a", range(1, 16))
    assert core.can_admit(49)
    core.append("a", range(16, 22))
    assert not core.can_admit(49) and core.can_admit(48)
    # More input has come, for which it has no pages yet.
    core.promise("a", 30)
    core.promise("a", 25)
    assert not core.can_admit(40) and core.can_admit(39)
    check_integrity(core)
    core.release("a", lambda page: False)
    core.add_request("b", 20)
    assert core.can_admit(49)


def test_acknowledgement_of_unknown_or_finished_transfer_is_ignored() -> None:
    core = make(num_ranks=2)
    (transfer,) = run_pages(core, "a", range(1, 3), 1)
    assert not core.acknowledge(99, [0, 1])
    assert not core.acknowledge(transfer, [1])
    assert not core.acknowledge(transfer, [1])
    assert core.acknowledge(transfer, [0])
    assert not core.acknowledge(transfer, [0, 1])
    check_integrity(core)


# --- starts from pages on the host ------------------------------------------------


def cached(core: Residency, pages: range, name: str = "a") -> list[int]:
    """Leave the pages of a finished request behind, clean and on the device."""
    for transfer in run_pages(core, name, pages, len(pages)):
        core.acknowledge(transfer, range(core.config.num_ranks))
    core.release(name, lambda page: True)
    core.take_update()
    return list(pages)


def fill(core: Residency, blocks: int, name: str = "filler") -> None:
    """Let another request take blocks, whatever has to go for it."""
    count = blocks // core.config.frame_blocks
    core.add_request(name, count)
    first = 1000 + 100 * len(core._requests)
    core.append(name, range(first, first + count))
    core.take_update()


def restore(core: Residency) -> list[PageCopy]:
    """Take a step in which all restores complete."""
    restores = core.take_update().restores
    for copy in restores:
        assert core.acknowledge(copy.transfer_id, range(core.config.num_ranks))
    return restores


def start(core: Residency, hits: list[int], new: int = 1) -> Start | None:
    """Start a request "b" once what it needs is there, if it fits."""
    while not core.claim("b", hits, new):
        assert restore(core)
    if not core.can_start("b", hits, new):
        return None
    how = core._claims["b"].start
    core.add_request("b", len(hits) + new)
    core.adopt("b", hits)
    core.append("b", range(500, 500 + new))
    check_integrity(core)
    return how


def test_a_start_is_whole_while_there_is_room() -> None:
    core = make(61)
    hits = cached(core, range(1, 13))
    fill(core, 12)
    assert start(core, hits) is Start.WHOLE
    update = core.take_update()
    assert update.requests["b"].lease is None and not update.restores


def test_a_start_is_lean_when_the_device_is_short() -> None:
    core = make(61)
    hits = cached(core, range(1, 13))
    fill(core, 42)
    assert start(core, hits[:11]) is Start.LEAN
    assert core.num_free == 0
    update = core.take_update()
    change = update.requests["b"]
    assert change.lease is not None and len(change.lease.blocks) == LEASE
    assert all(entry <= INDEXER_ONLY for entry in change.entries[:11])
    # All indexers were still there.
    assert not update.restores
    # Three pages had their latents; the lease took those of two.
    assert core.num_device_hits + core.num_host_hits == 11
    assert core.num_host_hits >= 8


def test_a_start_from_few_pages_takes_no_lease() -> None:
    """What is smaller than a lease is restored instead (D12)."""
    core = make(61)
    hits = cached(core, range(1, 13))
    fill(core, 48)
    assert not core.claim("b", hits[:2], 1)
    assert [copy.page_id for copy in restore(core)] == [1, 2]
    assert start(core, hits[:2]) is Start.WHOLE


def test_a_lean_start_restores_indexers_only() -> None:
    core = make(61)
    hits = cached(core, range(1, 13))
    fill(core, 60)
    core.release("filler", lambda page: False)
    fill(core, 33, "other")
    assert not core.claim("b", hits[:11], 1)
    restores = restore(core)
    assert [copy.page_id for copy in restores] == hits[:11]
    assert all(copy.indexer_block and not copy.latent_blocks for copy in restores)
    assert start(core, hits[:11]) is Start.LEAN
    assert (core.num_device_hits, core.num_host_hits) == (0, 11)


def test_a_lean_start_needs_a_row_of_hot_state() -> None:
    core = make(61)
    hits = cached(core, range(1, 13))
    fill(core, 42)
    core._free_rows, rows = [], core._free_rows
    assert start(core, hits[:11]) is None and not core._claims
    core._free_rows = rows
    assert core.claim("b", hits[:11], 1)
    core._free_rows = []
    assert not core.can_start("b", hits[:11], 1)
    core._free_rows = rows
    assert start(core, hits[:11]) is Start.LEAN


@pytest.mark.parametrize("seed", range(40))
def test_a_start_takes_no_more_than_it_was_said_to_cost(seed: int) -> None:
    random = Random(seed)
    core = make(61 + random.randrange(40))
    hits = cached(core, range(1, random.randrange(4, 14)))
    cached(core, range(100, 100 + random.randrange(1, 5)), "c")
    fill(core, random.randrange(3, core.num_free))
    if random.random() < 0.7:
        core.release("filler", lambda page: False)
        fill(core, random.randrange(3, core.num_free), "other")
    new = random.randrange(3)
    how = core._choose_start(hits, new)
    if how is None:
        return
    cost = core.cost_of_hits(hits, how) + new * core.config.frame_blocks
    assert cost <= core.num_free
    before = core.num_free
    assert start(core, hits, new) is how
    assert not core.take_update().restores
    # A lean request's latents that are still there stay evictable.
    assert before - core.num_free <= cost
    if how is Start.WHOLE:
        assert before - core.num_free == cost


def test_idle_blocks_bring_pages_back_newest_loss_first() -> None:
    core = make(101, restore_budget=3)
    hits = cached(core, range(1, 13))
    fill(core, 99)
    core.release("filler", lambda page: False)
    fill(core, 72, "other")
    assert start(core, hits[:11]) is Start.LEAN
    core.take_update()
    core.restore_some()
    assert not core.take_update().restores, "no block lies idle"
    core.release("other", lambda page: False)
    free = core.num_free
    core.restore_some()
    # Nobody reads them, and nobody else gets their blocks, before they are there.
    update = core.take_update()
    assert [copy.page_id for copy in update.restores] == [11, 10, 9]
    assert all(c.latent_blocks and not c.indexer_block for c in update.restores)
    assert not update.requests and core.num_free == free - 3 * STACKS
    core.restore_some()
    assert [copy.page_id for copy in restore(core)] == [8, 7, 6]
    for copy in update.restores:
        core.acknowledge(copy.transfer_id, [0])
    changed = core.take_update().requests["b"].changed
    assert sorted(changed) == [5, 6, 7, 8, 9, 10]
    assert all(entry > 0 for entry in changed.values())
    # They may go again at once: nothing was spent.
    assert core.num_free == free
    check_integrity(core)
    for _ in range(10):
        core.restore_some()
        restore(core)
    assert not core._requests["b"].host_only
    check_integrity(core)


def test_idle_blocks_are_those_beside_a_lease_and_a_frame_for_each_request() -> None:
    core = make(101)
    hits = cached(core, range(1, 13))
    fill(core, 99)
    core.release("filler", lambda page: False)
    fill(core, 69, "other")
    assert start(core, hits[:11]) is Start.LEAN
    core.restore_some()
    kept = LEASE + 2 * core.config.frame_blocks
    assert kept <= len(core._blocks) < kept + STACKS
    check_integrity(core)


# --- claims of waiting requests -----------------------------------------------------


def test_nobody_takes_the_blocks_that_a_copy_fills_or_has_filled_for_a_claim() -> None:
    core = make(61)
    hits = cached(core, range(1, 13))
    to_the_host(core)
    assert not core.claim("b", hits, 1)
    assert core.num_free == 60 - 36
    (copy, *others) = core.take_update().restores
    assert core.acknowledge(copy.transfer_id, [0])
    assert core.num_free == 60 - 36
    assert not core.claim("b", hits, 1) and not core.take_update().restores
    for other in others:
        core.acknowledge(other.transfer_id, [0])
    assert core.claim("b", hits, 1) and core.num_free == 60 - 36
    # Whoever does not start after all leaves them as they would be without.
    core.drop_claim("b")
    assert core.num_free == 60 and len(core._pages) == 12
    check_integrity(core)


def test_a_page_that_comes_for_one_waiting_request_comes_for_all() -> None:
    core = make(61)
    hits = cached(core, range(1, 5))
    to_the_host(core)
    assert not core.claim("b", hits, 1) and not core.claim("c", hits, 1)
    restores = restore(core)
    assert [copy.page_id for copy in restores] == hits
    assert core.claim("b", hits, 1) and core.claim("c", hits, 1)
    core.drop_claim("b")
    assert core.num_free == 60 - 12, "the other one's stay"


def test_a_running_request_that_needs_room_takes_it_from_claims() -> None:
    core = make(61)
    hits = cached(core, range(1, 13))
    assert core.claim("b", hits, 1) and core.num_free == 24
    core.add_request("r", 9)
    assert core.can_start("r", [], 9)
    core.append("r", range(500, 509))
    # What it has lost comes again when there is room again.
    assert not core._claims
    core.release("r", lambda page: False)
    assert not core.claim("b", hits, 1)
    assert restore(core) and core.claim("b", hits, 1)
    check_integrity(core)


def test_waiting_requests_take_room_only_from_claims_behind_them() -> None:
    """Or two of them could take it from each other for ever."""
    core = make(61, lease_blocks=30)
    first, second = cached(core, range(1, 11)), cached(core, range(20, 30), "c")
    assert core.claim("b", first, 1)
    assert core.claim("d", second, 1), "it does not fit"
    assert set(core._claims) == {"b"} and not core.can_start("d", second, 1)
    # In the next step the other one is asked first.
    core.take_update()
    while not core.claim("d", second, 1):
        restore(core)
    assert set(core._claims) == {"d"} and core.can_start("d", second, 1)
    check_integrity(core)


def test_a_start_becomes_lean_if_the_room_for_a_whole_one_is_gone() -> None:
    core = make(61)
    hits = cached(core, range(1, 13))
    assert core.claim("b", hits, 1) and core._claims["b"].start is Start.WHOLE
    core.add_request("r", 7)
    core.append("r", range(500, 507))
    assert core.can_start("b", hits, 2)
    assert core._claims["b"].start is Start.LEAN
    check_integrity(core)
    core.add_request("b", 14)
    core.adopt("b", hits)
    core.append("b", [600, 601])
    check_integrity(core)


def test_a_lean_claim_is_made_anew_when_the_last_row_goes() -> None:
    core = make(141, num_rows=1)
    hits = lean_hits(core)
    fill(core, 39, "extra")
    while not core.claim("b", hits, 1):
        restore(core)
    assert core._claims["b"].start is Start.LEAN
    core._grant_lease(core._requests["other"])
    assert core.claim("b", hits, 1) and not core.can_start("b", hits, 1)
    # There is no row yet, but room to start whole.
    core.release("extra", lambda page: False)
    assert start(core, hits) is Start.WHOLE


def test_a_whole_start_needs_no_spare_lease_that_nobody_can_get() -> None:
    core = make(41, num_rows=0)
    hits = cached(core, range(1, 12))
    fill(core, 3)
    assert core.num_free < 36 + LEASE
    assert start(core, hits) is Start.WHOLE


def test_a_claim_restores_a_bounded_number_of_pages_in_a_step() -> None:
    core = make(61, claim_budget=5)
    hits = cached(core, range(1, 13))
    to_the_host(core)
    counts = []
    while not core.claim("b", hits, 1):
        counts.append(len(restore(core)))
    assert counts == [5, 5, 2]


def test_a_claim_of_other_pages_replaces_the_old_one() -> None:
    core = make(61)
    hits = cached(core, range(1, 13))
    assert core.claim("b", hits, 1) and core.num_free == 24
    assert core.claim("b", hits[:2], 1) and core.num_free == 54
    assert not core.can_start("b", hits, 1)
    assert core.claim("b", [], 1) and core.num_free == 60 and not core._claims
    check_integrity(core)


def test_a_claimed_page_whose_place_is_handed_out_is_forgotten() -> None:
    core = make(61)
    hits = cached(core, range(1, 5))
    assert core.claim("b", hits, 1)
    core.add_request("r", 1)
    core.append("r", [2])
    check_integrity(core)
    # Its hash is gone, so the next look finds less.
    assert core.claim("b", hits[:1], 1)
    check_integrity(core)


# --- copies that fail -------------------------------------------------------------


def fail(core: Residency, transfer_id: int) -> None:
    ranks = range(core.config.num_ranks)
    assert not core.acknowledge(transfer_id, ranks, has_failed=True)


def test_a_copy_that_one_rank_could_not_complete_has_failed_when_all_have_ended() -> (
    None
):
    held: list[int] = []
    config = ResidencyConfig(
        num_blocks=40, num_stacks=STACKS, lease_blocks=LEASE, num_rows=4, num_ranks=3
    )
    core = Residency(config, held.append, held.remove)
    (transfer,) = run_pages(core, "a", range(1, 4), 1)
    assert not core.acknowledge(transfer, [1], has_failed=True)
    assert not core.acknowledge(transfer, [0])
    # The last one may still write the host page.
    assert held == [1] and not core.num_failed
    assert not core.acknowledge(transfer, [2])
    assert core.num_failed == 1 and core._pages[1].state is PageState.DIRTY
    check_integrity(core)


def test_a_failed_write_back_is_tried_again() -> None:
    core = make()
    (first, second) = run_pages(core, "a", range(1, 4), 2)
    fail(core, first)
    core.acknowledge(first, [0])
    (copy,) = core.take_update().write_backs
    assert copy.page_id == 1 and copy.transfer_id not in (first, second)
    assert core.num_failed == 1
    assert core.acknowledge(copy.transfer_id, [0])
    check_integrity(core)


def test_a_page_that_fails_too_often_stays_on_the_device_and_is_forgotten() -> None:
    unpublished: list[int] = []
    config = ResidencyConfig(
        num_blocks=40, num_stacks=STACKS, lease_blocks=LEASE, num_rows=4, max_failures=2
    )
    core = Residency(config, unpublish=unpublished.append)
    for transfer in run_pages(core, "a", range(1, 4), 2):
        fail(core, transfer)
    for copy in core.take_update().write_backs:
        fail(core, copy.transfer_id)
    assert core.num_failed == 4 and not core.take_update().write_backs
    core.seal("a", 3)
    (copy,) = core.take_update().write_backs
    assert copy.page_id == 3
    core.acknowledge(copy.transfer_id, [0])
    # Only the page that is clean can go.
    assert core.make_room(core.num_free)
    assert [page.page_id for page in core._evictable_latents.values()] in ([], [3])
    core.release("a", lambda page: True)
    assert sorted(unpublished) == [1, 2]
    assert core.num_free == 39
    check_integrity(core)


def test_a_page_without_owners_that_fails_too_often_is_forgotten_at_once() -> None:
    unpublished: list[int] = []
    config = ResidencyConfig(
        num_blocks=40, num_stacks=STACKS, lease_blocks=LEASE, num_rows=4, max_failures=1
    )
    core = Residency(config, unpublish=unpublished.append)
    (transfer,) = run_pages(core, "a", range(1, 3), 1)
    core.release("a", lambda page: page == 1)
    assert not unpublished
    fail(core, transfer)
    assert unpublished == [1] and core.num_free == 39 and not core.num_pending
    check_integrity(core)


def test_copies_that_stall_are_not_waited_for() -> None:
    core = make()
    run_pages(core, "a", range(1, 4), 2)
    assert core.may_gain_room()
    assert core.give_up_overdue(before_id=1) == {Direction.TO_HOST}
    assert not core.may_gain_room()
    # Said once, and no more are begun behind it.
    assert not core.give_up_overdue(before_id=2)
    core.seal("a", 3)
    assert not core.take_update().write_backs
    # One that ends shows that they do again.
    core.acknowledge(1, [0])
    assert core.may_gain_room() and len(core.take_update().write_backs) == 1
    assert core.give_up_overdue(before_id=3) == {Direction.TO_HOST}


def test_a_stall_gives_up_pages_that_nobody_owns() -> None:
    """The host page stays held until the copy, which may still write it, has ended."""
    held: list[int] = []
    unpublished: list[int] = []
    config = ResidencyConfig(
        num_blocks=40, num_stacks=STACKS, lease_blocks=LEASE, num_rows=4, num_ranks=2,
        write_back_budget=2,
    )  # fmt: skip
    core = Residency(config, held.append, held.remove, unpublished.append)
    first, second = run_pages(core, "a", range(1, 5), 3)
    core.acknowledge(first, [0])
    assert held == [1, 2, 3]
    core.release("a", lambda page: page < 4)
    assert core.num_free == 39 - 9
    core.give_up_overdue(before_id=1)
    check_integrity(core)
    # Two copies are under way, one was still waiting for its turn.
    assert sorted(unpublished) == [1, 2, 3] and core.num_free == 39
    assert held == [1, 2] and not core.num_pending
    assert not core.acknowledge(first, [1])
    assert held == [2]
    fail(core, second)
    assert not held
    check_integrity(core)


def test_a_stall_gives_up_other_pages_when_their_owners_leave() -> None:
    core = make()
    transfer, other = run_pages(core, "a", range(1, 4), 2)
    core.give_up_overdue(before_id=other)
    # The copy that was begun later ends: it alone does not.
    core.acknowledge(other, [0])
    assert core.num_pending == 1 and not core.transfers.stalled
    core.release("a", lambda page: page < 3)
    assert core.num_free == 39 and 1 not in core._pages
    assert not core.acknowledge(transfer, [0])
    check_integrity(core)


def test_a_request_that_is_sent_again_has_all_its_entries_and_its_lease() -> None:
    core = make(101)
    hits = cached(core, range(1, 13))
    to_the_host(core)
    fill(core, 69, "other")
    assert start(core, hits[:11]) is Start.LEAN
    first = core.take_update().requests["b"]
    core.release("other", lambda page: False)
    core.restore_some()
    restores = core.take_update().restores
    core.append("b", [501])
    core.resend("b")
    # What changes in the same step is named once.
    for copy in restores:
        core.acknowledge(copy.transfer_id, [0])
    again = core.take_update().requests["b"]
    assert again.start == first.start == 0 and not again.changed
    assert len(again.entries) == len(first.entries) + 1
    assert sum(e < 0 for e in again.entries) < sum(e < 0 for e in first.entries)
    assert again.lease is first.lease is not None
    assert "b" not in core.take_update().requests


# --- restores that fail, or do not end ----------------------------------------------


def losing(core_blocks: int = 101, **sizes: int) -> tuple[Residency, list[int]]:
    """A core that notes which pages it unpublishes."""
    unpublished: list[int] = []
    sizes = {"num_stacks": STACKS, "lease_blocks": LEASE, "num_rows": 4, **sizes}
    config = ResidencyConfig(num_blocks=core_blocks, **sizes)
    return Residency(config, unpublish=unpublished.append), unpublished


def to_the_host(core: Residency) -> None:
    """What pressure does while nobody runs."""
    core._blocks.give_back(core._take(core.num_free))
    assert not core._pages


def test_pages_whose_restore_failed_are_dropped_and_found_by_nobody() -> None:
    core, unpublished = losing(num_ranks=2)
    hits = cached(core, range(1, 7))
    to_the_host(core)
    assert not core.claim("b", hits, 1)
    *bad, good = core.take_update().restores
    for copy in bad:
        core.acknowledge(copy.transfer_id, [0])
        # The other rank may still write the blocks.
        assert core.num_free == 100 - 18 and not unpublished
    for copy in bad:
        core.acknowledge(copy.transfer_id, [1], has_failed=True)
    assert unpublished == hits[:5] and core.num_lost == 5
    assert core.acknowledge(good.transfer_id, [0, 1])
    assert list(core._pages) == [6] and core.num_free == 100 - 3
    check_integrity(core)
    assert core.claim("b", [], 1) and core.num_free == 100
    check_integrity(core)


def test_a_failed_restore_of_latents_changes_nothing_for_who_has_a_lease() -> None:
    core, unpublished = losing()
    start_lean_and_make_room(core)
    core.restore_some()
    lost = [copy.page_id for copy in core.take_update().restores]
    free = core.num_free
    for transfer in list(core.transfers):
        fail(core, transfer.copy.transfer_id)
    assert lost and core.num_free == free + STACKS * len(lost)
    assert not core.take_update().requests
    # The page is on the host, where its owner reads it: it is not lost.
    assert not unpublished and not core.num_lost
    check_integrity(core)


def test_a_restore_that_could_be_left_out_is_tried_three_times_in_all() -> None:
    """Even while others succeed, which shows that restores work again."""
    core, unpublished = losing(restore_budget=2)
    start_lean_and_make_room(core)
    (*_, bad) = core._requests["b"].host_only.values()
    tries = 0
    for _ in range(12):
        core.restore_some()
        for copy in core.take_update().restores:
            is_bad = copy.page_id == bad.page_id
            tries += is_bad
            core.acknowledge(copy.transfer_id, [0], has_failed=is_bad)
    assert tries == 3 and list(core._requests["b"].host_only.values()) == [bad]
    assert not unpublished
    check_integrity(core)


def test_a_restore_that_could_be_left_out_and_takes_too_long_loses_nothing() -> None:
    core, unpublished = losing()
    start_lean_and_make_room(core)
    core.restore_some()
    assert core.take_update().restores
    core.give_up_overdue(before_id=core.transfers.next_id)
    assert not unpublished and not core.num_lost
    check_integrity(core)


def test_a_failed_restore_loses_a_page_that_a_waiting_request_needs() -> None:
    """Though another one that runs can do without."""
    core, unpublished = losing()
    hits = lean_hits(core)
    assert start(core, hits) is Start.LEAN
    core.take_update()
    core.release("other", lambda page: False)
    assert not core.claim("c", hits, 1)
    copies = core.take_update().restores
    fail(core, copies[0].transfer_id)
    assert unpublished == [copies[0].page_id] and core.num_lost == 1
    check_integrity(core)


def test_a_page_to_which_latents_come_keeps_its_indexer() -> None:
    core, _ = losing()
    start_lean_and_make_room(core)
    core.restore_some()
    restores = core.take_update().restores
    core.release("b", lambda page: page != 500)
    core._blocks.give_back(core._take(core.num_free))
    assert sorted(core._pages) == sorted(copy.page_id for copy in restores)
    check_integrity(core)
    for copy in restores:
        assert core.acknowledge(copy.transfer_id, [0])
    assert core.num_free == 100
    check_integrity(core)


def lean_hits(core: Residency) -> list[int]:
    """Pages on the host, while a request "other" leaves no room to start whole."""
    hits = cached(core, range(1, 13))
    to_the_host(core)
    fill(core, 69, "other")
    return hits[:11]


def start_lean_and_make_room(core: Residency) -> None:
    """Let "b" start with a lease, and then the device have room for its pages."""
    assert start(core, lean_hits(core)) is Start.LEAN
    core.take_update()
    core.release("other", lambda page: False)


def test_restores_that_take_too_long_are_abandoned_but_their_blocks_are_held() -> None:
    core, unpublished = losing()
    hits = cached(core, range(1, 7))
    to_the_host(core)
    assert not core.claim("b", hits, 1)
    restores = core.take_update().restores
    assert core.may_gain_room()
    assert core.give_up_overdue(core.transfers.next_id - 1) == {Direction.TO_DEVICE}
    assert unpublished == hits[:5] and not core.may_gain_room()
    assert core.num_free == 100 - 18
    check_integrity(core)
    # The last one is not overdue, so it is still wanted.
    assert core.acknowledge(restores[5].transfer_id, [0])
    for copy in restores[:5]:
        assert not core.acknowledge(copy.transfer_id, [0])
    assert list(core._pages) == [6]
    core.drop_claim("b")
    assert core.num_free == 100
    check_integrity(core)


def test_while_restores_stall_prefixes_on_the_host_are_computed_again() -> None:
    """Also by who waits for one that was begun later: it goes the same way."""
    core, unpublished = losing()
    stuck, later = cached(core, range(1, 3)), cached(core, range(5, 8), "e")
    other = cached(core, range(11, 14), "c")
    to_the_host(core)
    assert not core.claim("b", stuck, 1)
    first = core.take_update().restores
    assert not core.claim("e", later, 1)
    core.take_update()
    core.give_up_overdue(first[-1].transfer_id + 1)
    assert unpublished == stuck
    free = core.num_free
    assert not core.claim("e", later, 1) and not core.claim("d", other, 1)
    assert unpublished == stuck + later + other and core.num_free == free
    assert not core.take_update().restores and set(core._claims) == {"b"}
    check_integrity(core)
    for transfer in list(core.transfers):
        core.acknowledge(transfer.copy.transfer_id, [0])
    core.drop_claim("b")
    assert core.num_free == 100 and not core.transfers.stalled
    check_integrity(core)


def test_while_restores_stall_a_request_starts_lean_if_its_indexers_are_there() -> None:
    core, unpublished = losing(161)
    stuck, hits = cached(core, range(60, 61)), cached(core, range(1, 13), "c")
    to_the_host(core)
    assert not core.claim("x", stuck, 1)
    core.take_update()
    # Indexers only, as after a lean start that is over.
    for page_id in hits:
        core._restore(page_id, Start.LEAN)
    restore(core)
    core.give_up_overdue(before_id=core.transfers.next_id)
    assert Direction.TO_DEVICE in core.transfers.stalled
    assert start(core, hits) is Start.LEAN and unpublished == stuck


def test_while_restores_stall_none_is_made_that_could_be_left_out() -> None:
    core, _ = losing()
    assert start(core, lean_hits(core)) is Start.LEAN
    core.take_update()
    core.transfers.stalled.add(Direction.TO_DEVICE)
    core.release("other", lambda page: False)
    core.restore_some()
    assert not core.take_update().restores
    core.transfers.stalled.clear()
    core.restore_some()
    assert core.take_update().restores


def test_no_restore_is_made_that_could_be_left_out_once_many_failed() -> None:
    core, _ = losing(max_failures=2, restore_budget=1)
    start_lean_and_make_room(core)
    for _ in range(2):
        core.restore_some()
        (copy,) = core.take_update().restores
        fail(core, copy.transfer_id)
    core.restore_some()
    assert not core.take_update().restores
    # One that had to be made shows that they do not fail any more.
    other = cached(core, range(600, 601), "c")
    core._blocks.give_back(core._take(core.num_free))
    assert not core.claim("d", other, 1) and restore(core)
    core.restore_some()
    assert core.take_update().restores


def test_forgetting_all_holds_what_copies_still_read_and_fill() -> None:
    held: list[int] = []
    config = ResidencyConfig(num_blocks=40, num_stacks=2, lease_blocks=4, num_rows=3)
    core = Residency(config, held.append, held.remove)
    hits = cached(core, range(1, 4))
    to_the_host(core)
    assert not core.claim("b", hits, 1) and held == hits
    restores = core.take_update().restores
    core.forget_all()
    check_integrity(core)
    assert core.abandoned_pages == held == hits and core.num_free == 39 - 9
    for copy in restores:
        assert not core.acknowledge(copy.transfer_id, [0])
    assert not held and core.num_free == 39
    check_integrity(core)


# --- found by breaking it -----------------------------------------------------------


def test_a_lean_start_waits_when_making_room_takes_the_last_row() -> None:
    core = Residency(
        ResidencyConfig(num_blocks=40, num_stacks=2, lease_blocks=2, num_rows=1)
    )
    cached(core, range(1, 4), "old")
    for transfer in run_pages(core, "fill", range(10, 21), 11):
        core.acknowledge(transfer, [0])
    core.append("fill", [30])
    core.take_update()
    assert start(core, [1, 2, 3]) is None
    assert not core._claims
    check_integrity(core)


def test_forgetting_all_takes_the_hash_of_what_is_not_clean() -> None:
    """Otherwise a hit would read a host page that was never written."""
    unpublished: list[int] = []
    held: list[int] = []
    config = ResidencyConfig(
        num_blocks=40, num_stacks=2, lease_blocks=4, num_rows=3, write_back_budget=1
    )
    core = Residency(config, held.append, held.remove, unpublished.append)
    (transfer,) = run_pages(core, "a", range(1, 4), 2)
    core.release("a", lambda page: page < 3)
    core.forget_all()
    assert sorted(unpublished) == [1, 2] and core.num_free == 39
    assert core.abandoned_pages == held == [1]
    core.acknowledge(transfer, [0])
    assert not held and not core.abandoned_pages
    check_integrity(core)
