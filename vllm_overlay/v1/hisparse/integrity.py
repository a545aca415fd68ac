# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Invariants of `Residency`, checked from scratch (R1, R2, R8).

Proportional to everything there is: for tests and debugging.
"""

from collections import Counter

from .pages import Direction, Page, PageState, Place, Start
from .pool import NULL_BLOCK
from .residency import Residency


def check_integrity(residency: Residency) -> None:
    """Check that the books balance.

    Raises:
        AssertionError: An invariant does not hold; the message names it.
    """
    _check_blocks(residency)
    _check_frames(residency)
    _check_requests(residency)
    _check_transfers(residency)


def _check_blocks(residency: Residency) -> None:
    """R8: every block but the null block is in exactly one place."""
    places = Counter(residency._blocks.free_blocks())
    for page in residency._pages.values():
        places.update(page.latent_blocks)
        if page.indexer_block:
            places[page.indexer_block] += 1
    for request in residency._requests.values():
        if request.lease is not None:
            places.update(request.lease.blocks)
            assert len(request.lease.blocks) == residency.config.lease_blocks
    for transfer in residency.transfers:
        if transfer.restored:
            places.update(transfer.copy.latent_blocks)
            if transfer.copy.indexer_block:
                places[transfer.copy.indexer_block] += 1
    expected = Counter(range(NULL_BLOCK + 1, residency.config.num_blocks))
    assert places == expected, f"blocks lost or held twice: {places - expected}"


def _check_frames(residency: Residency) -> None:
    frames = [page.frame_id for page in residency._pages.values()]
    assert sorted(frames + residency._free_frames) == list(
        range(1, residency.config.num_blocks)
    ), "frames lost or used twice"
    for page_id, page in residency._pages.items():
        assert page.page_id == page_id
        assert len(page.latent_blocks) in (0, residency.config.num_stacks)
        _check_page(residency, page)
    latents = {p.page_id for p in residency._pages.values() if _latents_may_go(p)}
    assert latents == set(residency._evictable_latents), "evictable latents"
    indexers = {p.page_id for p in residency._pages.values() if _indexer_may_go(p)}
    assert indexers == set(residency._evictable_indexers), "evictable indexers"
    owned = Counter(p.place for p in residency._pages.values() if p.owners)
    assert all(owned[place] == residency.num_owned(place) for place in Place), owned


def _latents_may_go(page: Page) -> bool:
    leased = all(owner.lease is not None for owner, _ in page.owners.values())
    is_claimed = Start.WHOLE in page.claims.values()
    return _is_still(page) and bool(page.latent_blocks) and leased and not is_claimed


def _indexer_may_go(page: Page) -> bool:
    is_wanted = bool(page.owners or page.claims)
    return _is_still(page) and bool(page.indexer_block) and not is_wanted


def _is_still(page: Page) -> bool:
    return page.state is PageState.CLEAN and page.transfer is None


def _check_page(residency: Residency, page: Page) -> None:
    whole = bool(page.indexer_block) and bool(page.latent_blocks)
    if page.state is not PageState.CLEAN:
        assert whole, f"page {page.page_id} lost a frame that is not clean (R1)"
    unleased = sum(owner.lease is None for owner, _ in page.owners.values())
    assert page.num_unleased == unleased, (page.page_id, unleased)
    for owner, index in page.owners.values():
        assert owner.pages[index] is page
        assert page.indexer_block, f"page {page.page_id} of a request lost its indexer"
        if owner.lease is None:
            assert whole, f"page {page.page_id} went before the lease came (R2)"
    # Latents go before the indexer, so what is left of a page has the indexer.
    is_coming = page.transfer is not None and page.transfer.copy.indexer_block
    assert page.indexer_block or is_coming, f"page {page.page_id} has an empty frame"
    if not page.owners and page.state is PageState.DIRTY:
        assert page.is_queued, f"page {page.page_id} is dirty and nobody's"


def _check_requests(residency: Residency) -> None:
    rows = list(residency._free_rows)
    for request_id, request in residency._requests.items():
        if request.lease is not None:
            rows.append(request.lease.row)
        for page in request.pages:
            assert residency._pages[page.page_id] is page
            assert page.owners[request_id][0] is request
        clean = [p for p in request.pages if p.state is PageState.CLEAN]
        resident = sum(bool(p.latent_blocks) for p in clean)
        assert request.num_convertible == resident, (request_id, resident)
        absent = {i: p for i, p in enumerate(request.pages) if not p.latent_blocks}
        assert request.host_only == absent, (request_id, absent)
    pages = sum(r.num_promised for r in residency._requests.values())
    assert pages == residency._promised_pages
    assert sorted(rows) == list(range(residency.config.num_rows))


def _check_transfers(residency: Residency) -> None:
    pages = residency._pages
    pending = dict.fromkeys(Direction, 0)
    for transfer in residency.transfers:
        page = transfer.page
        if not transfer.is_abandoned:
            pending[transfer.direction] += 1
            assert pages.get(page.page_id) is page, f"page {page.page_id} went (R5)"
            assert page.transfer is transfer
            is_written = page.state is PageState.PENDING
            assert is_written == (transfer.restored is None), page.page_id
    states = [p for p in pages.values() if p.state is PageState.PENDING]
    assert all(page.transfer is not None for page in states), "pending without a copy"
    for way, count in pending.items():
        assert count == residency.transfers.num_pending(way), way
    queued = list(residency._to_write)
    flags = [p.page_id for p in pages.values() if p.is_queued]
    assert sorted(queued) == sorted(flags), "write-back queue"
    for request_id, claim in residency._claims.items():
        assert request_id not in residency._requests, request_id
        wanted = {p.page_id for p in pages.values() if request_id in p.claims}
        assert wanted <= set(claim.page_ids), request_id
    claims = {name for page in pages.values() for name in page.claims}
    assert claims <= residency._claims.keys(), "claims of nobody"
