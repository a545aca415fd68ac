# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Tensors and encodings that the kernels share.

Sizes, used in all docstrings of this package:

====  ===========================================================================
T     query tokens of the step, padded tokens included
B     requests of the batch, padded requests included
K     top-k: positions per query token
S, P  state rows; pages per request
F, G  frames; stacks (groups of layers that share blocks)
M, H  mixed rows; hot rows of one request
HB    blocks of a hot buffer per stack, ceil(H / block_size)
OB    overflow blocks of a mixed row
NS    stacks the layers of one index unit lie in
====  ===========================================================================

A *hot index* names a row outside the frames of a request: ``0 <= i < H`` is hot slot
``i``, and ``H + i`` is overflow row ``i`` (D23).
"""

from dataclasses import dataclass

import torch
import triton.language as tl

NO_FRAME = -1
NO_SLOT = -1
NO_ROW = -1

# Logical plan codes, int32, one for each (query token, top-k entry). A code names a
# row without saying in which stack, so that each stack can be translated (D7).
#   code >= 0    resident: frame * block_size + offset
#   CODE_PADDING nothing selected
#   CODE_MISS    on the host only; lives from lookup to assign
#   code <= -3   hot index CODE_HOT - code
CODE_PADDING = tl.constexpr(-1)
CODE_MISS = tl.constexpr(-2)
CODE_HOT = tl.constexpr(-3)

# Page-table entries below NO_FRAME: the latents are on the host only, and frame
# INDEXER_ONLY - entry still holds the page's indexer block (D9).
INDEXER_ONLY = tl.constexpr(-2)

# Columns of the counters tensor, int64 [B, NUM_COUNTERS]; a row belongs to a batch
# row, so programs never add to the same cell. Sum over dim 0 for a unit's total.
COUNTER_HITS = 0  # distinct hot slots used
COUNTER_MISSES = 1  # distinct positions fetched, overflow included
COUNTER_OVERFLOW = 2  # of these, into overflow rows
COUNTER_SHARED = 3  # misses of a query row that another row of the request had too
COUNTER_STEPS = 4  # times the request was resolved
NUM_COUNTERS = 5

# Cells of the fault tensor, int32 [NUM_FAULTS]; zero, or one after an internal fault.
FAULT_NO_FRAME = tl.constexpr(0)  # a selected row is nowhere
FAULT_OVERFLOW = tl.constexpr(1)  # misses exceed hot buffer and overflow rows
FAULT_QUERY_ROWS = tl.constexpr(2)  # a request has more query rows than announced
NUM_FAULTS = 3

# int16 encodings of `pos_slot` (slots, claims) and `order` (slots): D21.
MAX_HOT_ROWS = 32767
MAX_CLAIMS = 32766


@dataclass(frozen=True)
class Residency:
    """Where the pages of all requests are on the device (D18).

    Attributes:
        page_frame: int32 ``[S, P]``, dense. Frame of a request's page; any negative
            entry means that the latents are on the host only. See INDEXER_ONLY.
        frame_blocks: int32 ``[F, 1 + G]``, dense. Column 0 the indexer block,
            column 1 + g the block of stack g. Frame 0 is null: all its blocks are 0.
        mixed_row: int32 ``[S]``. Row of the hot state, -1 without a hot lease.
    """

    page_frame: torch.Tensor
    frame_blocks: torch.Tensor
    mixed_row: torch.Tensor


@dataclass(frozen=True)
class HotBlocks:
    """Blocks leased for hot and overflow rows.

    Attributes:
        hot_blocks: int32 ``[M, G, HB]``, dense.
        overflow_blocks: int32 ``[M, OB]``, dense, OB may be 0. One set serves every
            stack: the rows live only through one layer's attention (D23).
    """

    hot_blocks: torch.Tensor
    overflow_blocks: torch.Tensor


@dataclass(frozen=True)
class HotUnit:
    """LRU of the hot rows of one index unit, for each mixed row (D21).

    ``pos_slot[m, p] == s`` exactly when ``slot_pos[m, s] == p``; all other entries of
    ``pos_slot`` are NO_SLOT. It holds between launches.

    Attributes:
        slot_pos: int32 ``[M, H]``, dense. Position in the slot, -1 empty.
        order: int16 ``[M, H]``, dense. The slots, least recently used first.
        pos_slot: int16 ``[M, max_positions]``, dense. Slot of a position.
    """

    slot_pos: torch.Tensor
    order: torch.Tensor
    pos_slot: torch.Tensor


@dataclass(frozen=True)
class FetchPlan:
    """Rows that every layer of one unit copies from the host this step.

    The entries of a request that go to hot slots come first; they may be fetched
    ahead. Those behind ``hot_count`` go to overflow rows and are fetched just before
    the layer's attention (D23). One plan per unit in flight (D24).

    Attributes:
        src: int32 ``[B, N]``, N >= query rows * K. Host row, page * block_size
            + offset.
        slot: int32 ``[B, N]``. Hot index.
        count: int32 ``[B]``. Entries.
        hot_count: int32 ``[B]``. Entries that go to hot slots.
    """

    src: torch.Tensor
    slot: torch.Tensor
    count: torch.Tensor
    hot_count: torch.Tensor


def new_hot_state(
    num_units: int,
    mixed_rows: int,
    hot_rows: int,
    max_positions: int,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate the empty LRU state of all units.

    Args:
        num_units: Index units U.
        mixed_rows: M.
        hot_rows: H, 1..32767.
        max_positions: Positions a request can have.
        device: Where to put it.

    Returns:
        ``slot_pos`` int32 ``[U, M, H]``, ``order`` int16 ``[U, M, H]`` and ``pos_slot``
        int16 ``[U, M, max_positions]``; index u of each makes a HotUnit.

    Raises:
        ValueError: ``hot_rows`` does not fit the int16 encoding.
    """
    if not 1 <= hot_rows <= MAX_HOT_ROWS:
        raise ValueError(f"hot rows {hot_rows} must be in 1..{MAX_HOT_ROWS}")
    shape = (num_units, mixed_rows, hot_rows)
    slot_pos = torch.full(shape, NO_SLOT, dtype=torch.int32, device=device)
    order = torch.arange(hot_rows, dtype=torch.int16, device=device)
    order = order.expand(shape).contiguous()
    pos_slot = torch.full(
        (num_units, mixed_rows, max_positions),
        NO_SLOT,
        dtype=torch.int16,
        device=device,
    )
    return slot_pos, order, pos_slot


def new_fetch_plan(batch: int, entries: int, device: torch.device | str) -> FetchPlan:
    """Allocate an empty plan.

    Args:
        batch: Most requests of a batch.
        entries: Most entries of a request: query rows * K.
        device: Where to put it.
    """

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return FetchPlan(
        src=zeros(batch, entries),
        slot=zeros(batch, entries),
        count=zeros(batch),
        hot_count=zeros(batch),
    )


def scratch_width(hot_rows: int, entries: int) -> int:
    """Columns of assign's scratch, int32 ``[B, width]``; units may share one."""
    return 2 * hot_rows + entries
