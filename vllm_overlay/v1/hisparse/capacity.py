# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""How many blocks and pages there are, and what a request needs of them (D14, D21).

All counts of blocks are of the device pool, all counts of pages of the host pool. Pure
Python, standard library only: the server, the start-up line, the planner and the
simulator ask the same code.
"""

from dataclasses import dataclass

from .layout import DevicePlan

HOT_STATE_SHARE = 0.02
"""Largest part of the device pool that the hot state may take (D21)."""

NUM_COUNTERS = 5
"""Counters of a unit and request, see `kernels.tensors`."""

INT64_BYTES = 8
INT32_BYTES = 4
INT16_BYTES = 2


def ceil_div(a: int, b: int) -> int:
    """`a / b`, rounded up; both positive."""
    return -(-a // b)


@dataclass(frozen=True)
class HotSizes:
    """Rows of a hot buffer (D23).

    Attributes:
        topk: rows that one query token selects.
        hot_rows: rows of the hot buffer, a multiple of the block size.
        drafts: speculative tokens per step; a request has 1 + drafts query rows.
    """

    topk: int
    hot_rows: int
    drafts: int = 0

    @property
    def overflow_rows(self) -> int:
        """Rows a step may need beyond the hot buffer: (drafts-1)*topk at 2*topk."""
        return max(0, (1 + self.drafts) * self.topk - self.hot_rows)


@dataclass(frozen=True)
class Limits:
    """What the configuration allows requests to be.

    Attributes:
        max_model_len: tokens of a request.
        max_num_seqs: requests that run at once; state rows on the worker.
        window_tokens: tokens in flight of all requests together.
        decode_tokens: tokens in flight of one decoding request, drafts and lookahead
            included.
        step_tokens: tokens of one step, where that is more than all requests decode.
    """

    max_model_len: int
    max_num_seqs: int
    window_tokens: int
    decode_tokens: int = 1
    step_tokens: int = 0


@dataclass(frozen=True)
class PoolPlan:
    """Device pool, host pool and hot state: one plan for scheduler and workers.

    Attributes:
        device: geometry of the blocks.
        hot: sizes of a hot buffer.
        limits: what requests may be.
        num_blocks: blocks of the device pool, the null block included.
        num_pages: pages of the host pool, the null page included.
    """

    device: DevicePlan
    hot: HotSizes
    limits: Limits
    num_blocks: int
    num_pages: int

    # -- hot lease ---------------------------------------------------------------

    @property
    def hot_blocks(self) -> int:
        """HB, hot blocks of a lease in each stack."""
        return ceil_div(self.hot.hot_rows, self.device.block_size)

    @property
    def overflow_blocks(self) -> int:
        """OB, overflow blocks of a lease; they serve every stack in turn (D23)."""
        return ceil_div(self.hot.overflow_rows, self.device.block_size)

    @property
    def lease_blocks(self) -> int:
        """Blocks of a hot lease."""
        return self.device.num_stacks * self.hot_blocks + self.overflow_blocks

    # -- what a request needs ----------------------------------------------------

    def pages(self, tokens: int) -> int:
        """Pages of `tokens` tokens."""
        return ceil_div(tokens, self.device.block_size)

    def resident_blocks(self, tokens: int) -> int:
        """Blocks of a request that is fully on the device."""
        return self.pages(tokens) * self.device.frame_blocks

    @property
    def tail_pages(self) -> int:
        """Most pages that hold unsealed rows of a decoding request (R3)."""
        return 1 + self.pages(self.limits.decode_tokens)

    def steady_blocks(self, tokens: int) -> int:
        """Blocks of a decoding request in the state that needs least of them.

        Mixed: the indexer block of every page, the lease and the tail. A context
        smaller than its lease is never mixed (D12), so it counts as resident.
        """
        mixed = (
            self.pages(tokens)
            + self.lease_blocks
            + self.tail_pages * self.device.frame_blocks
        )
        return min(mixed, self.resident_blocks(tokens))

    @property
    def window_blocks(self) -> int:
        """Blocks of the one in-flight window of all requests together (D14)."""
        return self.resident_blocks(self.limits.window_tokens)

    @property
    def conversion_blocks(self) -> int:
        """Blocks with which a growing request gets to give pages away (D12).

        Before it does, more of its pages must be clean than its lease costs, while
        the lease is still free and the window of unsealed pages is on the device.
        """
        clean = self.lease_blocks // self.device.num_stacks + 1
        frames = clean * self.device.frame_blocks
        return frames + self.lease_blocks + self.window_blocks

    def admission_blocks(self, tokens: int) -> int:
        """Blocks that must exist for one request of `tokens` tokens to be served."""
        mixed = self.steady_blocks(tokens) + self.window_blocks
        return min(
            max(mixed, self.conversion_blocks),
            self.resident_blocks(tokens),
        )

    # -- what the pools hold -----------------------------------------------------

    @property
    def usable_blocks(self) -> int:
        """Blocks that can be handed out: all but the null block."""
        return max(0, self.num_blocks - 1)

    def steady_concurrency(self, tokens: int) -> float:
        """Decoding requests of `tokens` tokens that the device pool holds.

        `max_num_seqs`, the number of mixed rows and the host pool are not looked at.
        """
        return self.usable_blocks / self.steady_blocks(tokens)

    def admission_concurrency(self, tokens: int) -> float:
        """The same beside one full in-flight window, i.e. while prompts come in."""
        room = max(0, self.usable_blocks - self.window_blocks)
        return room / self.steady_blocks(tokens)

    @property
    def device_tokens(self) -> int:
        """Resident tokens that the device pool holds."""
        pages = self.usable_blocks // self.device.frame_blocks
        return pages * self.device.block_size

    @property
    def host_tokens(self) -> int:
        """Tokens that the host pool holds."""
        return max(0, self.num_pages - 1) * self.device.block_size

    @property
    def device_bytes(self) -> int:
        """Bytes of the device pool."""
        return self.num_blocks * self.device.block_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the host pool."""
        return self.num_pages * self.device.host_page_bytes

    # -- bookkeeping on the device -------------------------------------------------

    @property
    def mixed_rows(self) -> int:
        """M, rows of the hot state: requests that can be mixed at once.

        No more than leases fit the device, and no more than `HOT_STATE_SHARE` of the
        pool pays for; at least one. Requests of `max_model_len` tokens always have
        enough: a row's 2 bytes per position and unit are less than 2 % of the 132
        bytes that the indexer of the unit takes.
        """
        affordable = int(self.device_bytes * HOT_STATE_SHARE) // self.hot_row_bytes
        leases = self.usable_blocks // self.lease_blocks
        return max(1, min(leases, self.limits.max_num_seqs, affordable))

    @property
    def hot_row_bytes(self) -> int:
        """Hot state of one mixed row in all units (D21).

        `slot_pos` int32 and `order` int16 by hot slot, `pos_slot` int16 by position.
        """
        positions = self.pages(self.limits.max_model_len) * self.device.block_size
        slots = self.hot.hot_rows * (INT32_BYTES + INT16_BYTES)
        return len(self.device.units) * (slots + positions * INT16_BYTES)

    @property
    def hot_state_bytes(self) -> int:
        """Hot state of all mixed rows, with the tables of their leased blocks."""
        return self.mixed_rows * (self.hot_row_bytes + self.lease_blocks * INT32_BYTES)

    @property
    def max_frames(self) -> int:
        """F, frames that can exist at once, the null frame included.

        Every frame holds one block or more: its indexer block (D9).
        """
        return self.num_blocks

    @property
    def residency_bytes(self) -> int:
        """Residency by state row, the batch's indexer table, and `frame_blocks`."""
        pages = self.pages(self.limits.max_model_len)
        by_row = self.limits.max_num_seqs * (2 * pages + 2)
        return (by_row + self.max_frames * self.device.frame_blocks) * INT32_BYTES

    @property
    def resolver_bytes(self) -> int:
        """Outputs and scratch of the resolver, which all units share.

        For each token of a step, with top-k K: rows by stack, codes and a count. For
        each request, with n query rows and H hot rows: marks of hot rows, scratch and
        plan of `assign`; marks and numbers of staged pages; counters.
        """
        rows, topk = 1 + self.hot.drafts, self.hot.topk
        stacks = max(len(unit.stacks) for unit in self.device.units)
        pages = self.pages(self.limits.max_model_len) + 1
        words = 2 * self.hot.hot_rows + rows * topk
        words += 2 * rows * topk + 2 + pages
        marks = self.hot.hot_rows + pages
        counters = len(self.device.units) * NUM_COUNTERS * INT64_BYTES
        each = words * INT32_BYTES + marks + counters
        token = ((stacks + 1) * topk + 1) * INT32_BYTES
        return self.resolved_tokens * token + self.limits.max_num_seqs * each

    @property
    def resolved_tokens(self) -> int:
        """Most tokens of a step or of a captured graph."""
        decodes = self.limits.max_num_seqs * (1 + self.hot.drafts)
        return max(decodes, self.limits.step_tokens)

    @property
    def bookkeeping_bytes(self) -> int:
        """Device bytes beside the pool; taken from the budget before it is sized."""
        return self.hot_state_bytes + self.residency_bytes + self.resolver_bytes


def plan_pools(
    device: DevicePlan, hot: HotSizes, limits: Limits, num_blocks: int, host_bytes: int
) -> PoolPlan:
    """Plan for a device pool of a given number of blocks.

    Args:
        device: geometry.
        hot: hot buffer; `hot_rows` must be a multiple of the block size.
        limits: what requests may be.
        num_blocks: blocks of the device pool, the null block included.
        host_bytes: bytes of the host pool; whole pages of it are used.
    """
    assert hot.hot_rows % device.block_size == 0, (hot.hot_rows, device.block_size)
    num_pages = host_bytes // device.host_page_bytes
    return PoolPlan(device, hot, limits, num_blocks, num_pages)


def pool_bytes(
    device: DevicePlan, hot: HotSizes, limits: Limits, available_bytes: int
) -> int:
    """Part of `available_bytes` that is left for the device pool.

    The bookkeeping is counted for the pool that the whole of `available_bytes` would
    give. It grows with the pool, so what is set aside here always suffices.
    """
    blocks = available_bytes // device.block_bytes
    whole = plan_pools(device, hot, limits, blocks, host_bytes=0)
    return max(0, available_bytes - whole.bookkeeping_bytes)
