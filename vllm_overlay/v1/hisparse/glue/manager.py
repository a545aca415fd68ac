# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""vLLM's block manager of the DSA group, with the device pool behind it (D6-D8).

vLLM's blocks are pages of the host pool. This manager gives each page of a running
request a frame on the device, and answers "does it fit" for both pools.
"""

import time
from collections import deque
from collections.abc import Sequence

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from ..capacity import PoolPlan
from ..frames import ResidencyConfig
from ..pages import Direction, Place
from ..residency import Residency
from .spec import HiSparsePageSpec

logger = init_logger(__name__)

# More blocks than any host pool has: vLLM compares it with its free blocks.
DOES_NOT_FIT = 1 << 62

# Steps that a copy is waited for, however long they take.
MIN_STEPS_WAITED = 8

_CONSEQUENCES = {
    Direction.TO_HOST: "requests that need room are preempted, and pages of finished "
    "ones are forgotten",
    Direction.TO_DEVICE: "requests that need the pages compute them again",
}


def residency_config(plan: PoolPlan, num_ranks: int = 1) -> ResidencyConfig:
    """Sizes of the residency core for a plan of the pools."""
    return ResidencyConfig(
        num_blocks=plan.num_blocks,
        num_stacks=plan.device.num_stacks,
        lease_blocks=plan.lease_blocks,
        num_rows=plan.mixed_rows,
        tail_pages=plan.tail_pages,
        window_pages=plan.pages(plan.limits.window_tokens),
        num_ranks=num_ranks,
    )


class HiSparseManager(FullAttentionManager):
    """Allocates host pages as vLLM's blocks, and a frame for each (D8)."""

    def __init__(self, kv_cache_spec, block_pool, *args, **kwargs) -> None:
        super().__init__(kv_cache_spec, block_pool, *args, **kwargs)
        # Host ids must never be zeroed as device blocks.
        assert not self.records_new_block_ids
        self.residency = Residency(
            residency_config(kv_cache_spec.plan, kv_cache_spec.num_ranks),
            hold=self._hold_page,
            unhold=self._unhold_page,
            unpublish=lambda page_id: self.block_pool.evict_blocks({page_id}),
        )
        self._clock = time.monotonic
        self._timeout_s = kv_cache_spec.transfer_timeout_s
        # When steps began, in seconds waited, and the id that the next copy had then;
        # copies with ids before the last one take too long.
        self._steps: deque[tuple[float, int]] = deque()
        self._overdue_before = 0
        self._seen, self._waited_s = self._clock(), 0.0
        self._counted_hits = (0, 0)
        self._promised_pages: dict[str, int] = {}
        self._known: set[str] = set()
        # Of the step that is being scheduled: for requests of which pages were
        # published, the first of these; and whether a running one was denied pages.
        self._first_published: dict[str, int] = {}
        self._has_denied = False
        # Computed tokens that a multi-module drafter may still write again (R6).
        self.num_reprefillable_tokens = 0

    # --- references of copies in flight (R5) ------------------------------------

    def _hold_page(self, page_id: int) -> None:
        self.block_pool.touch([self.block_pool.blocks[page_id]])

    def _unhold_page(self, page_id: int) -> None:
        self.block_pool.free_blocks([self.block_pool.blocks[page_id]])

    # --- allocation -----------------------------------------------------------

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
    ) -> int:
        """Host pages to allocate, or more than there are if the device is short."""
        num_pages = cdiv(num_tokens, self.block_size)
        held = len(self.req_to_blocks.get(request_id, ()))
        if held >= num_pages and request_id in self._known:
            return 0  # what most requests ask in most steps
        host_pages = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap,
        )
        if apply_admission_cap:
            # The gate for whole sequences; also asked about running requests, which
            # were admitted, but may have got more input since.
            if request_id in self._known:
                self.residency.promise(request_id, num_pages)
            elif self.residency.can_admit(num_pages):
                self._promised_pages[request_id] = num_pages
            else:
                self.residency.drop_claim(request_id)
                return DOES_NOT_FIT
            return host_pages
        new = max(num_pages - held - len(new_computed_blocks), 0)
        hits = [block.block_id for block in new_computed_blocks]
        if not new and not hits:
            return host_pages
        is_running = request_id in self._known
        if self._has_denied and not is_running:
            # Or newer requests could take every block that a running one waits for.
            return DOES_NOT_FIT
        if host_pages > self.block_pool.get_num_free_blocks():
            self._has_denied |= is_running
            return DOES_NOT_FIT
        # While pages of its prefix come from the host it stays first in its queue.
        is_ready = self.residency.claim(request_id, hits, new)
        if not is_ready or not self.residency.can_start(request_id, hits, new):
            self._has_denied |= is_running
            return DOES_NOT_FIT
        return host_pages

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        super().add_local_computed_blocks(
            request_id,
            new_computed_blocks,
            num_local_computed_tokens,
            num_external_computed_tokens,
        )
        self._add_request(request_id, len(new_computed_blocks))
        hits = [block.block_id for block in new_computed_blocks]
        self.residency.adopt(request_id, hits)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        new_blocks = super().allocate_new_blocks(
            request_id, num_tokens, num_tokens_main_model
        )
        if new_blocks:
            self._add_request(request_id, len(new_blocks))
            self.residency.append(request_id, [block.block_id for block in new_blocks])
        return new_blocks

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        # Imports would land in host pages; configuration refuses other connectors.
        assert num_external_computed_tokens == 0

    def _add_request(self, request_id: str, num_pages: int) -> None:
        if request_id not in self._known:
            self._known.add(request_id)
            promised = self._promised_pages.pop(request_id, 0)
            self.residency.add_request(request_id, max(promised, num_pages))

    def new_step_starts(self) -> None:
        super().new_step_starts()
        self._has_denied = False
        self._watch_copies()

    def _watch_copies(self) -> None:
        """Stop waiting for copies that take too long."""
        # One long step, or a machine that was asleep, is not a copy that hangs: what
        # has ended meanwhile is only known after the next one.
        now, steps = self._clock(), self._steps
        self._waited_s += min(now - self._seen, self._timeout_s / MIN_STEPS_WAITED)
        self._seen = now
        next_id = self.residency.transfers.next_id
        if not steps or steps[-1][1] != next_id:
            steps.append((self._waited_s, next_id))
        while steps and self._waited_s - steps[0][0] > self._timeout_s:
            _, self._overdue_before = steps.popleft()
        for way in self.residency.give_up_overdue(self._overdue_before):
            logger.warning(
                "HiSparse: a copy %s has not ended within %.0f s (transfer_timeout_s): "
                "copies %s are not waited for any more, until one ends; %s",
                way.value,
                self._timeout_s,
                way.value,
                _CONSEQUENCES[way],
            )

    def acknowledge(
        self, done: dict[int, set[int]], failed: dict[int, set[int]]
    ) -> None:
        """Take note of copies that ranks have ended.

        Args:
            done: Ranks that completed each.
            failed: Ranks that could not complete it.
        """
        # Tail first, so that the heads of prefixes stay longest.
        for transfer_id in sorted(done, reverse=True):
            self.residency.acknowledge(transfer_id, done[transfer_id])
        for transfer_id, ranks in failed.items():
            self.residency.acknowledge(transfer_id, ranks, has_failed=True)
        if failed:
            logger.warning_once(
                "HiSparse: copies between device and host have failed. One to the host "
                "is tried %d times in all, and then its page stays on the device "
                "(failed_transfers counts them); pages that cannot be copied from the "
                "host are computed again (lost_pages counts them)",
                self.residency.config.max_failures,
            )

    # --- sealing and release ----------------------------------------------------

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Full attention skips nothing; the frontier seals pages (R6)."""
        settled = max(0, processed_computed_tokens - self.num_reprefillable_tokens)
        self.residency.seal(request_id, settled // self.block_size)

    def cache_blocks(
        self, request: Request, num_tokens: int, retention_interval: int | None = None
    ) -> None:
        """Publish a request's full pages, before the step that fills them has run."""
        first = self.num_cached_block.get(request.request_id, 0)
        super().cache_blocks(request, num_tokens, retention_interval)
        if self.num_cached_block.get(request.request_id, 0) > first:
            self._first_published[request.request_id] = first

    def step_is_scheduled(self) -> None:
        """Nobody asks for more in this step, and it fills what it has published."""
        self._first_published.clear()
        self.residency.restore_some()

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._promised_pages.pop(request_id, None)
        first = self._first_published.pop(request_id, None)
        if first is not None:
            # Preempted in the step that was to fill them; vLLM 0.29.0 leaves such
            # pages to prefix hits.
            unfilled = self.req_to_blocks[request_id][first:]
            self.block_pool.evict_blocks({block.block_id for block in unfilled})
        if request_id in self._known:
            self._known.remove(request_id)
            self.residency.release(request_id, self._is_published)
        self.residency.drop_claim(request_id)
        return super().pop_blocks_for_free(request_id)

    def _is_published(self, page_id: int) -> bool:
        return self.block_pool.blocks[page_id].block_hash is not None

    def may_gain_room(self) -> bool:
        """Whether copies under way will make blocks available (D14)."""
        return self.residency.may_gain_room()

    # --- what vLLM shows of the device -------------------------------------------

    @property
    def usage(self) -> float:
        """Share of the device pool that cannot be had at once, 0 to 1."""
        blocks = self.residency.config.num_blocks - 1
        return 1.0 - self.residency.num_free / blocks

    def gauges(self) -> dict[str, int | float]:
        """Values of `metrics.GAUGES`."""
        mixed = self.residency.num_leases
        return {
            "host_pool_usage": self.block_pool.get_usage(),
            "host_pages_cached": len(self.block_pool.cached_block_hash_to_block),
            "pending_transfers": self.residency.num_pending,
            "failed_transfers": self.residency.num_failed,
            "lost_pages": self.residency.num_lost,
            "stalled": int(bool(self.residency.transfers.stalled)),
            "requests_full": len(self._known) - mixed,
            "requests_mixed": mixed,
            "pages_device": self.residency.num_owned(Place.DEVICE),
            "pages_both": self.residency.num_owned(Place.BOTH),
            "pages_host": self.residency.num_owned(Place.HOST),
        }

    def take_counters(self) -> dict[str, int]:
        """Increments of `metrics.SCHEDULER_COUNTERS` since the last call."""
        residency = self.residency
        hits = residency.num_device_hits, residency.num_host_hits
        device, host = (new - old for new, old in zip(hits, self._counted_hits))
        self._counted_hits = hits
        return {"prefix_pages_device": device, "prefix_pages_host": host}

    def name_medium(self, events: list[KVCacheEvent]) -> None:
        """Say in the pool's events that its pages are in main memory."""
        for event in events:
            if isinstance(event, (BlockStored, BlockRemoved)):
                event.medium = MEDIUM_CPU

    def reset_prefix_cache(self) -> bool:
        """Reset the host pool's prefix cache, and drop the device's copies.

        A reset that is refused changes nothing. Copies under way do not stand in its
        way: their host pages count as free for the moment of the reset.
        """
        pool = self.block_pool
        num_references = sum(block.ref_cnt for block in pool.blocks[1:])
        if self._known or num_references > self.residency.num_holds:
            return pool.reset_prefix_cache()
        self.residency.forget_all()
        held = self.residency.abandoned_pages
        for page_id in held:
            self._unhold_page(page_id)
        is_reset = self.block_pool.reset_prefix_cache()
        for page_id in held:
            self._hold_page(page_id)
        return is_reset


def register() -> None:
    """Make vLLM choose this manager for `HiSparsePageSpec` (D8).

    The registry fills itself only while it is empty, so vLLM's own specs come first.
    """
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(HiSparsePageSpec, HiSparseManager, FullAttentionSpec)
