# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Empties mixed rows of the hot state when they change hands (D21).

`pos_slot` is long (one entry for each position a request can have), so it is not
filled: only the entries that `slot_pos` names can be set, and those are cleared.
"""

import torch
import triton
import triton.language as tl

from . import checks
from .tensors import NO_SLOT


@triton.jit
def _reset_kernel(
    mixed_rows_ptr,
    slot_pos_ptr,
    order_ptr,
    pos_slot_ptr,
    num_mixed,
    max_positions,
    H: tl.constexpr,
    TILE: tl.constexpr,
):
    mixed = tl.load(mixed_rows_ptr + tl.program_id(0)).to(tl.int64)
    if mixed < 0:
        return
    row = tl.program_id(1).to(tl.int64) * num_mixed + mixed
    for first in range(0, H, TILE):
        slot = first + tl.arange(0, TILE)
        lane = slot < H
        slot_pos = slot_pos_ptr + row * H + slot
        pos = tl.load(slot_pos, mask=lane, other=-1)
        empty = tl.full([TILE], -1, tl.int16)
        tl.store(pos_slot_ptr + row * max_positions + pos, empty, mask=pos >= 0)
        tl.store(order_ptr + row * H + slot, slot.to(tl.int16), mask=lane)
        tl.debug_barrier()
        tl.store(slot_pos, tl.full([TILE], -1, tl.int32), mask=lane)


def reset_rows(
    mixed_rows: torch.Tensor,
    slot_pos: torch.Tensor,
    order: torch.Tensor,
    pos_slot: torch.Tensor,
    *,
    tile: int | None = None,
) -> None:
    """Make mixed rows empty in all units.

    Args:
        mixed_rows: int32 ``[N]``, distinct; -1 entries are skipped.
        slot_pos: int32 ``[U, M, H]``, dense.
        order: int16 ``[U, M, H]``, dense.
        pos_slot: int16 ``[U, M, max_positions]``, dense.
        tile: Slots a program looks at together, a power of two.

    Raises:
        ValueError: With checks enabled: a shape or dtype differs.
    """
    num_units, num_mixed, hot_rows = slot_pos.shape
    if checks.ENABLED:
        checks.expect("mixed_rows", mixed_rows, torch.int32, None)
        checks.expect("slot_pos", slot_pos, torch.int32, None, None, None)
        checks.expect("order", order, torch.int16, *slot_pos.shape)
        checks.expect("pos_slot", pos_slot, torch.int16, num_units, num_mixed, None)
        for name, tensor in (
            ("slot_pos", slot_pos),
            ("order", order),
            ("pos_slot", pos_slot),
        ):
            checks.expect_dense(name, tensor)
    if mixed_rows.shape[0] == 0:
        return
    if tile is None:
        tile = triton.next_power_of_2(hot_rows)
        tile = tile if slot_pos.device.type == "cpu" else min(tile, 1024)
    _reset_kernel[(mixed_rows.shape[0], num_units)](
        mixed_rows,
        slot_pos,
        order,
        pos_slot,
        num_mixed,
        pos_slot.shape[2],
        H=hot_rows,
        TILE=tile,
        num_warps=4,
    )


def reset_rows_reference(
    mixed_rows: torch.Tensor,
    slot_pos: torch.Tensor,
    order: torch.Tensor,
    pos_slot: torch.Tensor,
) -> None:
    """`reset_rows` in torch; it fills the whole of `pos_slot`."""
    for mixed in mixed_rows.tolist():
        if mixed >= 0:
            slot_pos[:, mixed] = NO_SLOT
            pos_slot[:, mixed] = NO_SLOT
            order[:, mixed] = torch.arange(order.shape[2], dtype=torch.int16)
