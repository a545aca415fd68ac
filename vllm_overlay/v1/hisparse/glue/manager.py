# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""vLLM's block manager of the DSA group, with the device pool behind it (D6-D8).

vLLM's blocks are pages of the host pool. This manager gives each page of a running
request a frame on the device, and answers "does it fit" for both pools.
"""

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

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

from ..capacity import PoolPlan
from ..residency import Place, Residency, ResidencyConfig, Start
from .spec import HiSparsePageSpec

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

logger = init_logger(__name__)

# More blocks than any host pool has: vLLM compares it with its free blocks.
DOES_NOT_FIT = 1 << 62


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
        # Copies that had ended when one ended last, and when that was.
        self._num_ended, self._last_end = 0, self._clock()
        self._counted_hits = (0, 0)
        self._promised_pages: dict[str, int] = {}
        self._known: set[str] = set()
        # Of the request whose blocks were counted last; it allocates next.
        self._start = Start.WHOLE
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
            # The gate for whole sequences; also asked about running requests, whose
            # pages were counted when they were admitted.
            if request_id not in self._known:
                if not self.residency.can_admit(num_pages):
                    return DOES_NOT_FIT
                self._promised_pages[request_id] = num_pages
            return host_pages
        new = max(num_pages - held - len(new_computed_blocks), 0)
        hits = [block.block_id for block in new_computed_blocks]
        start = self.residency.choose_start(hits, new) if new or hits else Start.WHOLE
        if start is None:
            return DOES_NOT_FIT
        self._start = start
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
        self.residency.adopt(request_id, hits, self._start)

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
        """Use what lies idle before anybody asks for more."""
        super().new_step_starts()
        self._watch_copies()
        self.residency.restore_some()

    def _watch_copies(self) -> None:
        """Stop waiting for copies when none has ended for too long."""
        residency, now = self.residency, self._clock()
        num_ended = residency.num_completed + residency.num_failed
        if num_ended != self._num_ended or not residency.num_pending:
            self._num_ended, self._last_end = num_ended, now
            residency.is_stalled = False
        elif now - self._last_end > self._timeout_s and not residency.is_stalled:
            logger.warning(
                "HiSparse: none of %d copies to the host has ended for %.0f s "
                "(transfer_timeout_s): they are not waited for any more; requests that "
                "need room are preempted, and pages of finished ones are forgotten",
                residency.num_pending,
                self._timeout_s,
            )
            residency.stall()

    def note_failures(self, transfer_ids: set[int]) -> None:
        """Take note of copies to the host that failed on some rank."""
        for transfer_id in transfer_ids:
            self.residency.fail(transfer_id)
        if transfer_ids:
            logger.warning_once(
                "HiSparse: copies to the host have failed; each is tried again, up to "
                "%d times, and then its page stays on the device (failed_transfers "
                "counts them)",
                self.residency.config.max_failures,
            )

    def recompute(
        self, scheduler: "Scheduler", page_ids: set[int], scheduled: Iterable[str]
    ) -> set[str]:
        """Take back what was computed with pages whose restore failed.

        Affected requests are preempted, tokens in flight included: the runner keeps
        its own count of a running request's tokens, which cannot be taken back. The
        pages are found by nobody any more, so that the requests get on even if every
        restore fails.

        Args:
            scheduler: Before it looks at the outputs of the step that restored.
            page_ids: From the workers.
            scheduled: Requests of that step.

        Returns:
            Requests whose output of that step is not to be used.
        """
        running = {request.request_id for request in scheduler.running}
        wrong = self.residency.spoil(page_ids, running)
        logger.warning_once(
            "HiSparse: copies from the host have failed; requests that needed the "
            "pages compute them again (lost_pages counts them)"
        )
        # Backwards, for each goes to the front of those that wait.
        for request in reversed(scheduler.running):
            if request.request_id in wrong:
                scheduler._preempt_request(request, time.monotonic(), True)
        scheduler.running = [r for r in scheduler.running if r.request_id not in wrong]
        self.residency.lose(page_ids)
        # Preempted since the step began: what it read is not known any more.
        for request_id in scheduled:
            other = scheduler.requests.get(request_id)
            if other is not None and other.num_stale_output_tokens:
                other.drop_stale_output = True
                wrong.add(request_id)
        return wrong

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

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._promised_pages.pop(request_id, None)
        if request_id in self._known:
            self._known.remove(request_id)
            self.residency.release(request_id, self._is_published)
        return super().pop_blocks_for_free(request_id)

    def _is_published(self, page_id: int) -> bool:
        return self.block_pool.blocks[page_id].block_hash is not None

    def may_gain_room(self) -> bool:
        """Whether write-backs under way will make blocks available (D14)."""
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
            "pending_transfers": self.residency.num_pending,
            "failed_transfers": self.residency.num_failed,
            "lost_pages": self.residency.num_lost,
            "stalled": int(self.residency.is_stalled),
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
        if self._known:
            return self.block_pool.reset_prefix_cache()
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
