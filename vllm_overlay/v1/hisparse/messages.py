# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What scheduler and workers tell each other about pages (D17).

Plain data: picklable, no tensors. Ids are those of `residency`.
"""

from dataclasses import dataclass, field

NO_FRAME = -1
"""Entry of a page that is nowhere on the device."""

INDEXER_ONLY = -2
"""Entries below NO_FRAME: frame `INDEXER_ONLY - entry` holds the page's indexer block
only; its latents are on the host (D9)."""


@dataclass(frozen=True)
class PageCopy:
    """A copy of one page between its frame and the host.

    Attributes:
        transfer_id: Names the copy in the acknowledgement.
        page_id: The page, its place in the host pool.
        indexer_block: Device block of the indexers, 0 to leave them out.
        latent_blocks: Device block of each stack, empty to leave them out.
    """

    transfer_id: int
    page_id: int
    indexer_block: int
    latent_blocks: tuple[int, ...]


@dataclass(frozen=True)
class HotLease:
    """Blocks that a request holds for rows of its host-only pages.

    Attributes:
        row: The request's place in the hot state.
        blocks: Block ids: for each stack its hot blocks, then the overflow blocks.
    """

    row: int
    blocks: tuple[int, ...]


@dataclass
class RequestUpdate:
    """What changed for one request.

    Attributes:
        start: First page whose entry follows; 0 gives the whole table again, and
            takes a lease away that an earlier request had on the same state row.
        entries: Entry of each page from `start` on: its frame, or `INDEXER_ONLY`
            minus it.
        changed: New entries of pages before `start`.
        lease: The lease, where it was granted in this step.
    """

    start: int
    entries: list[int] = field(default_factory=list)
    changed: dict[int, int] = field(default_factory=dict)
    lease: HotLease | None = None


@dataclass
class StepUpdate:
    """Everything that changed between two steps.

    The worker applies `frames` and `requests` before anything of the step is launched
    (R4). Copies come after what earlier steps have launched; every rank acknowledges
    each. A restored part is in nobody's tables before.

    Attributes:
        frames: Blocks of frames that changed: indexer block, then one for each
            stack; 0 where absent.
        requests: By request id.
        write_backs: Device to host.
        restores: Host to device.
    """

    frames: dict[int, tuple[int, ...]] = field(default_factory=dict)
    requests: dict[str, RequestUpdate] = field(default_factory=dict)
    write_backs: list[PageCopy] = field(default_factory=list)
    restores: list[PageCopy] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.frames or self.requests or self.write_backs or self.restores)
