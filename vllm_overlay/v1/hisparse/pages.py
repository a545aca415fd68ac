# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Pages, the requests that own them, and copies of them under way."""

from dataclasses import dataclass, field
from enum import Enum

from .messages import INDEXER_ONLY, HotLease, PageCopy


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


class Direction(Enum):
    """Which way a copy goes."""

    TO_HOST = "to the host"
    TO_DEVICE = "from the host"


@dataclass(eq=False, slots=True)
class Transfer:
    """A copy of a page that some rank has not ended.

    Attributes:
        copy: What the workers are asked to do.
        page: The page as it was when the copy began.
        direction: A write-back or a restore.
        ranks: Ranks that have ended it.
        has_failed: Whether one of them could not complete it.
        is_overdue: Whether it took too long.
        is_abandoned: Whether its page does not wait for it any more. It may still read
            or write its host page and its blocks.
    """

    copy: PageCopy
    page: "Page"
    direction: Direction
    ranks: set[int] = field(default_factory=set)
    has_failed: bool = False
    is_overdue: bool = False
    is_abandoned: bool = False

    @property
    def restored(self) -> PageCopy | None:
        """The blocks that it fills, if it is a restore."""
        return self.copy if self.direction is Direction.TO_DEVICE else None


@dataclass(eq=False, slots=True)
class Page:
    """A page that has a frame; one without is clean and on the host only.

    Attributes:
        page_id: Place in the host pool.
        frame_id: Index of its frame.
        state: State of the host copy.
        indexer_block: Block of its indexers, 0 if it is not there.
        latent_blocks: Block of each stack, empty if they are not there.
        owners: Running requests that list the page, each with the page's index there.
        num_unleased: Those of them that hold no lease.
        claims: Waiting requests that will start with it, and how.
        transfer: The copy of it that is under way, if any.
        is_queued: Waits for its write-back to be issued.
        num_failures: Copies of it that failed.
    """

    page_id: int
    frame_id: int
    state: PageState
    indexer_block: int
    latent_blocks: tuple[int, ...]
    owners: dict[str, tuple["RequestPages", int]] = field(default_factory=dict)
    num_unleased: int = 0
    claims: dict[str, Start] = field(default_factory=dict)
    transfer: Transfer | None = None
    is_queued: bool = False
    num_failures: int = 0

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

    def is_ready(self, start: Start) -> bool:
        """Whether a request can start like this with what is there of the page."""
        needs_latents = start is Start.WHOLE
        return bool(self.latent_blocks if needs_latents else self.indexer_block)


@dataclass(eq=False, slots=True)
class RequestPages:
    """A running request.

    Attributes:
        pages: Its pages, in order.
        num_sealed: Leading pages that no step will write again (R6).
        num_sent: Leading pages whose frames the workers know.
        num_promised: Pages that admission counted for it.
        num_convertible: Clean pages with latents on the device.
        num_shared: What of its pages, in parts, is the share of others that hold no
            lease either: n requests that share a page can each give up 1/n of it.
        shared_at: `Residency` counts changes of sharing; its count for `num_shared`.
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
    num_shared: float = 0.0
    shared_at: int = -1
    host_only: dict[int, Page] = field(default_factory=dict)
    lease: HotLease | None = None


@dataclass(eq=False, slots=True)
class Claim:
    """Pages with the prefix of a waiting request; they stay until it starts.

    Attributes:
        page_ids: The pages, in order.
        start: How it will start.
        num_host_hits: Pages whose latents were on the host only when it claimed them.
        turn: Step in which it was last asked for.
    """

    page_ids: list[int]
    start: Start
    num_host_hits: int
    turn: int = -1
