# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Copies the planned rows of one layer from the host into hot and overflow rows (D24).

The kernel reads pinned host memory in place. It works on a flat list of 16-byte
chunks, so that every lane is busy whatever the row width is.
"""

import enum

import torch
import triton
import triton.language as tl

from . import checks
from .tensors import FetchPlan, HotBlocks, Residency

# 8 KB per program and turn with 4 warps, so that some tens of KB are in flight over
# all programs (D24). Not tuned on a GPU yet.
TILE_CHUNKS = 512
DEFAULT_PROGRAMS = 32
CHUNK_BYTES = 16


class FetchPart(enum.Enum):
    """Which entries of a plan are fetched."""

    ALL = 0
    HOT = 1
    OVERFLOW = 2


@triton.jit(
    do_not_specialize=["num_requests", "stack", "layer_chunk"],
    # It may begin anywhere in a longer tensor.
    do_not_specialize_on_alignment=["state_row_ptr"],
)
def _fetch_kernel(
    plan_src_ptr,
    plan_slot_ptr,
    plan_count_ptr,
    plan_hot_count_ptr,
    state_row_ptr,
    mixed_row_ptr,
    hot_blocks_ptr,
    overflow_blocks_ptr,
    host_ptr,
    slab_ptr,
    num_requests,
    plan_stride,
    stack,
    layer_chunk,
    PART: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    H: tl.constexpr,
    HB: tl.constexpr,
    OB: tl.constexpr,
    G: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    # With fewer requests than programs several programs share a request, and those
    # left over find none; otherwise each walks over several requests.
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    share = tl.maximum(programs // num_requests, 1)
    walkers = programs // share
    word = tl.arange(0, 4)
    for request in range(program // share, num_requests, walkers):
        first = 0
        count = tl.load(plan_count_ptr + request)
        if PART == 1:
            count = tl.load(plan_hot_count_ptr + request)
        if PART == 2:
            first = tl.load(plan_hot_count_ptr + request)
        if count > first:
            state = tl.load(state_row_ptr + request)
            mixed = tl.load(mixed_row_ptr + state).to(tl.int64)
            plan = tl.cast(request, tl.int64) * plan_stride
            hot_blocks = hot_blocks_ptr + (mixed * G + stack) * HB
            over_blocks = overflow_blocks_ptr + mixed * OB
            begin = first * ROW_CHUNKS + program % share * TILE
            for chunk0 in range(begin, count * ROW_CHUNKS, share * TILE):
                chunk = chunk0 + tl.arange(0, TILE)
                lane = chunk < count * ROW_CHUNKS
                entry = chunk // ROW_CHUNKS
                part = chunk - entry * ROW_CHUNKS
                source = tl.load(plan_src_ptr + plan + entry, mask=lane, other=0)
                index = tl.load(plan_slot_ptr + plan + entry, mask=lane, other=0)
                is_hot = index < H
                over = index - H
                block = tl.load(
                    hot_blocks + index // BLOCK_SIZE, mask=lane & is_hot, other=0
                )
                block += tl.load(
                    over_blocks + over // BLOCK_SIZE, mask=lane & (over >= 0), other=0
                )
                offset = tl.where(is_hot, index, over) % BLOCK_SIZE
                from_chunk = source.to(tl.int64) * ROW_CHUNKS + part
                to_chunk = block.to(tl.int64) * BLOCK_CHUNKS + layer_chunk
                to_chunk += offset * ROW_CHUNKS + part
                words = tl.load(
                    host_ptr + (from_chunk * 4)[:, None] + word[None, :],
                    mask=lane[:, None],
                    other=0,
                )
                tl.store(
                    slab_ptr + (to_chunk * 4)[:, None] + word[None, :],
                    words,
                    mask=lane[:, None],
                )


def launch_shape(
    device: torch.device, programs: int | None, tile: int | None
) -> tuple[int, int]:
    """Default programs and chunks per program of a copy kernel.

    The interpreter pays per program and operation, so there it is few and long ones.
    """
    on_cpu = device.type == "cpu"
    return (
        programs or (1 if on_cpu else DEFAULT_PROGRAMS),
        tile or (4096 if on_cpu else TILE_CHUNKS),
    )


def fetch_rows(
    plan: FetchPlan,
    state_row: torch.Tensor,
    residency: Residency,
    hot: HotBlocks,
    host_rows: torch.Tensor,
    slab: torch.Tensor,
    *,
    stack: int,
    layer_offset: int,
    hot_rows: int,
    block_size: int,
    part: FetchPart = FetchPart.ALL,
    programs: int | None = None,
    tile: int | None = None,
) -> None:
    """Copy one layer's planned rows from the host into the request's own blocks.

    Args:
        plan: From `assign`, still live (D24). Requests with no entries are skipped.
        state_row: int32 ``[B]``, as given to `assign`.
        residency: Page tables; only ``mixed_row`` is read.
        hot: Leased blocks.
        host_rows: uint8 ``[host pages * block_size, row_bytes]``, dense, 16-byte
            aligned; pinned host memory where the slab is on a GPU.
        slab: uint8 ``[blocks, block_bytes]``, dense, 16-byte aligned; written.
        stack: Stack of the layer, 0..G-1.
        layer_offset: Byte of a block at which the layer's rows begin.
        hot_rows: H.
        block_size: Tokens of a page, a power of two.
        part: Which entries. Hot rows of followers may be fetched ahead; overflow
            rows serve every layer in turn, so they are fetched just before the
            layer's attention (D23).
        programs: Programs of the launch; more of them take SMs from attention.
        tile: 16-byte chunks a program copies at a time, a power of two.

    Raises:
        ValueError: With checks enabled: a shape, dtype or alignment does not hold.
    """
    row_bytes = host_rows.shape[1]
    block_bytes = slab.shape[1]
    if checks.ENABLED:
        _check_fetch(plan, hot, host_rows, slab, layer_offset, block_size)
    num_requests = state_row.shape[0]
    if num_requests == 0:
        return
    programs, tile = launch_shape(slab.device, programs, tile)
    _fetch_kernel[(programs,)](
        plan.src,
        plan.slot,
        plan.count,
        plan.hot_count,
        state_row,
        residency.mixed_row,
        hot.hot_blocks,
        hot.overflow_blocks,
        host_rows.view(torch.int32),
        slab.view(torch.int32),
        num_requests,
        plan.src.stride(0),
        stack,
        layer_offset // CHUNK_BYTES,
        PART=part.value,
        ROW_CHUNKS=row_bytes // CHUNK_BYTES,
        BLOCK_CHUNKS=block_bytes // CHUNK_BYTES,
        H=hot_rows,
        HB=hot.hot_blocks.shape[2],
        OB=hot.overflow_blocks.shape[1],
        G=hot.hot_blocks.shape[1],
        BLOCK_SIZE=block_size,
        TILE=tile,
        num_warps=4,
    )


def _check_fetch(plan, hot, host_rows, slab, layer_offset, block_size) -> None:
    checks.expect("plan.src", plan.src, torch.int32, None, None)
    checks.expect("plan.slot", plan.slot, torch.int32, *plan.src.shape)
    checks.expect("hot_blocks", hot.hot_blocks, torch.int32, None, None, None)
    checks.expect("host_rows", host_rows, torch.uint8, None, None)
    checks.expect("slab", slab, torch.uint8, None, None)
    checks.expect_dense("host_rows", host_rows)
    checks.expect_dense("slab", slab)
    row_bytes = host_rows.shape[1]
    for name, value in (
        ("row bytes", row_bytes),
        ("block bytes", slab.shape[1]),
        ("layer offset", layer_offset),
        ("address of host_rows", host_rows.data_ptr()),
        ("address of slab", slab.data_ptr()),
    ):
        checks.expect_multiple(name, value, CHUNK_BYTES)
    end = layer_offset + block_size * row_bytes
    checks.expect_at_most("end of the layer in a block", end, slab.shape[1])


def fetch_rows_reference(
    plan: FetchPlan,
    state_row: torch.Tensor,
    residency: Residency,
    hot: HotBlocks,
    host_rows: torch.Tensor,
    slab: torch.Tensor,
    *,
    stack: int,
    layer_offset: int,
    hot_rows: int,
    block_size: int,
    part: FetchPart = FetchPart.ALL,
) -> None:
    """`fetch_rows` in torch, with the same arguments and effects."""
    row_bytes = host_rows.shape[1]
    for request, state in enumerate(state_row.tolist()):
        count = int(plan.count[request])
        num_hot = int(plan.hot_count[request])
        first = num_hot if part is FetchPart.OVERFLOW else 0
        last = num_hot if part is FetchPart.HOT else count
        for entry in range(first, last):
            mixed = int(residency.mixed_row[state])
            index = int(plan.slot[request, entry])
            blocks = hot.hot_blocks[mixed, stack]
            if index >= hot_rows:
                index -= hot_rows
                blocks = hot.overflow_blocks[mixed]
            block = int(blocks[index // block_size])
            start = layer_offset + index % block_size * row_bytes
            source = host_rows[int(plan.src[request, entry])]
            slab[block, start : start + row_bytes] = source
