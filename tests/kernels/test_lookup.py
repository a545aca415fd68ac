# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""lookup, translate and reset on their own."""

import pytest
import torch
from kernels.assign import assign
from kernels.lookup import lookup, lookup_reference
from kernels.reset import reset_rows, reset_rows_reference
from kernels.tensors import (
    FAULT_NO_FRAME,
    FAULT_OVERFLOW,
    FAULT_QUERY_ROWS,
    MAX_HOT_ROWS,
    new_hot_state,
)
from kernels.translate import translate, translate_reference

from crossing import ON_GPU
from world import World, row_of, stream

I32 = dict(dtype=torch.int32)


def resolve(world, rows, run=lookup, stacks=None, **args):
    """`lookup` of request 0; returns rows, code, valid and used."""
    positions = torch.stack(rows)
    stacks = world.stacks if stacks is None else stacks
    states = torch.tensor(world.state_of[:1], **I32)
    out = torch.full((len(stacks), *positions.shape), 12345, **I32)
    code = torch.full_like(positions, 12345)
    valid = torch.full((len(rows),), 12345, **I32)
    used = torch.zeros_like(world.used)
    if "tile" not in args:
        args["valid"] = valid
    run(
        positions, torch.zeros(len(rows), **I32), states,
        world.residency, world.unit, world.hot, stacks, out, code, used, world.faults,
        block_size=world.block_size, block_stride_rows=world.block_rows, **args,
    )  # fmt: skip
    return out, code, valid, used


def finish(world, rows, out, code, used, plan_rows=None):
    """`assign` after `resolve`."""
    assign(
        torch.stack(rows), torch.tensor([0, len(rows)], **I32),
        torch.tensor(world.state_of[:1]).int(), world.residency, world.host_table(),
        world.unit, world.hot, world.stacks, out, code, used, world.scratch, world.plan,
        world.counters, world.faults, max_query_rows=plan_rows or world.query_rows,
        block_size=world.block_size, block_stride_rows=world.block_rows,
    )  # fmt: skip


@pytest.mark.parametrize("top_k", [1, 33, 64])
@pytest.mark.parametrize("block_stride_rows", [16, 35])
def test_rows_of_resident_requests_are_those_of_the_plain_conversion(
    top_k, block_stride_rows, races
):
    world = World(top_k=top_k, hot_rows=64, requests=2)
    world.set_residency(1.0)
    world.residency.mixed_row.fill_(-1)
    positions = torch.stack([world.draw(0.2) for _ in range(5)])
    token_request = torch.tensor([0, 1, 1, 0, 1], **I32)
    states = torch.tensor(world.state_of, **I32)
    rows = torch.zeros((2, 5, top_k), **I32)
    code, valid = torch.zeros_like(positions), torch.zeros(5, **I32)
    lookup(
        positions, token_request, states, world.residency, world.unit, world.hot,
        world.stacks, rows, code, world.used, world.faults, block_size=16,
        block_stride_rows=block_stride_rows, valid=valid,
    )  # fmt: skip
    for i, stack in enumerate(world.stacks.tolist()):
        frames = world.residency.page_frame[states.long()]
        block_table = world.residency.frame_blocks[frames.long(), 1 + stack]
        blocks = block_table[token_request.long()[:, None], positions // 16]
        plain = blocks * block_stride_rows + positions % 16
        assert torch.equal(rows[i], torch.where(positions < 0, -1, plain).int())
    assert torch.equal(valid, (positions >= 0).sum(1).int())
    assert not world.used.any() and not world.faults.any()


def test_tiles_give_the_same_as_whole_rows(races):
    world = World(top_k=33, hot_rows=66, query_rows=2)
    stream(world, 2, keep=0.5, residency=(0.3,))
    rows = [world.draw(0.2), world.draw(0.2)]
    whole = resolve(world, rows)
    tiled = resolve(world, rows, tile=16, tokens=1)
    for name, one, other in zip(("rows", "code", "", "used"), whole, tiled):
        if name:
            assert torch.equal(one, other), name


def test_a_row_that_is_nowhere_raises_the_flag_and_resolves_to_padding():
    world = World(top_k=4, hot_rows=4)
    world.restore(0, 0)
    world.residency.mixed_row.fill_(-1)
    rows = [row_of(world, [3, 16, 5])]
    out, code, valid, _ = resolve(world, rows)
    assert (out[0, 0] >= 0).tolist() == [True, False, True, False]
    assert valid.tolist() == [2] and code[0, 1] == -1
    assert world.faults.tolist() == [1, 0, 0]


@pytest.mark.parametrize("pos", [8 * 16, (1 << 31) - 1])
def test_a_position_behind_the_tables_raises_the_flag(pos):
    world = World(top_k=4, hot_rows=4)
    world.set_residency(1.0)
    for run in (lookup, lookup_reference):
        world.faults.zero_()
        out, _, valid, _ = resolve(world, [row_of(world, [pos, 1])], run)
        assert out[0, 0, 0] == -1 and valid.tolist() == [1]
        assert world.faults[FAULT_NO_FRAME.value] == 1


def test_a_host_only_page_behind_the_position_map_raises_the_flag():
    world = World(top_k=4, hot_rows=4)
    short = world.unit.pos_slot[:, :100].contiguous()
    world.unit = type(world.unit)(world.unit.slot_pos, world.unit.order, short)
    for run in (lookup, lookup_reference):
        world.faults.zero_()
        _, code, _, _ = resolve(world, [row_of(world, [99, 100])], run)
        assert code[0, :2].tolist() == [-2, -1]
        assert world.faults[FAULT_NO_FRAME.value] == 1


def test_misses_without_room_raise_the_flag_and_resolve_to_padding():
    world = World(top_k=33, hot_rows=33, query_rows=2, pages=13, overflow_rows=16)
    rows = [row_of(world, range(33)), row_of(world, range(33, 66))]
    out, code, _, used = resolve(world, rows)
    finish(world, rows, out, code, used)
    assert world.faults[FAULT_OVERFLOW.value] == 1
    assert (code[1, :16] == -3 - 33 - torch.arange(16)).all()
    assert (code[1, 16:] == -1).all() and (out[:, 1, 16:] == -1).all()
    assert world.plan.count[0] == 49 and world.plan.hot_count[0] == 33
    world.check_maps()


def test_more_query_rows_than_announced_raise_the_flag():
    world = World(top_k=4, hot_rows=8)
    rows = [row_of(world, [0, 1]), row_of(world, [2])]
    out, code, _, used = resolve(world, rows)
    finish(world, rows, out, code, used, plan_rows=1)
    assert world.faults[FAULT_QUERY_ROWS.value] == 1
    assert code[1, 0] == -2 and out[0, 1, 0] == -1 and world.plan.count[0] == 2


def test_negative_page_entries_all_mean_host_only():
    world = World(top_k=4, hot_rows=4)
    world.residency.page_frame[world.state_of[0], 0] = -2 - 5
    _, code, _, _ = resolve(world, [row_of(world, [0])])
    assert code[0, 0] == -2


@pytest.mark.parametrize("tile, tokens", [(None, None), (16, 1)])
def test_codes_translate_to_every_stack_and_stride(tile, tokens, races):
    world = World(top_k=33, hot_rows=33, query_rows=2, pages=13, unit_stacks=(1,))
    world.restore(0, 3)
    world.step([[world.draw(), world.draw()]])
    rows = [world.draw(0.1), world.draw(0.1)]
    out, code, _, used = resolve(world, rows)
    finish(world, rows, out, code, used)
    kinds = (code >= 0, (code <= -3) & (code > -36), code <= -36, code == -1)
    assert all(kind.any() for kind in kinds), "resident, hot, overflow, padding"
    stacks = torch.tensor([0, 1, 2, 1], **I32)
    got = torch.zeros((4, 2, 33), **I32)
    want = torch.ones_like(got)
    for stride in (world.block_rows, 16):
        for run, into, args in (
            (translate, got, {"tile": tile, "tokens": tokens}),
            (translate_reference, want, {}),
        ):
            run(
                code, torch.zeros(2, **I32), torch.tensor(world.state_of).int(),
                world.residency, world.hot, stacks, into, hot_rows=33, block_size=16,
                block_stride_rows=stride, **args,
            )  # fmt: skip
        assert torch.equal(got, want)
        if stride == world.block_rows:
            assert torch.equal(got[1:2], out)


def test_translate_gives_padding_for_padded_tokens_and_misses():
    world = World(top_k=4, hot_rows=4)
    code = torch.tensor([[5, -3, -7, -2]] * 3, **I32)
    got = torch.zeros((1, 3, 4), **I32)
    translate(
        code, torch.tensor([1, -1, 1 << 30], **I32), torch.tensor([0, -1], **I32),
        world.residency, world.hot, world.stacks[:1], got, hot_rows=4, block_size=16,
        block_stride_rows=16,
    )  # fmt: skip
    assert (got == -1).all()


@pytest.mark.parametrize("hot_rows, tile", [(33, None), (33, 16), (64, 16)])
def test_reset_empties_the_named_rows_of_all_units_only(hot_rows, tile, races):
    world = World(top_k=16, hot_rows=hot_rows, requests=3)
    world.step([[row_of(world, range(16))] for _ in range(3)])
    stream(world, 1, keep=0.5, residency=(0.2,))
    # Unit 1 was used; give unit 0 the same contents.
    for tensor in world.state:
        tensor[0] = tensor[1]
    want = [tensor.clone() for tensor in world.state]
    rows = torch.tensor([world.mixed_of[2], -1, world.mixed_of[0]], **I32)
    reset_rows(rows, *world.state, tile=tile)
    reset_rows_reference(rows, *want)
    for have, tensor in zip(world.state, want):
        assert torch.equal(have, tensor)
    kept = world.mixed_of[1]
    assert (world.state[0][:, kept] >= 0).any()


def test_hot_rows_beyond_the_encoding_are_refused():
    with pytest.raises(ValueError, match="32768 must be in 1..32767"):
        new_hot_state(1, 1, MAX_HOT_ROWS + 1, 16, "cpu")


def test_claims_beyond_the_encoding_are_refused():
    world = World(top_k=4, hot_rows=4)
    rows = [row_of(world, [0])]
    out, code, _, used = resolve(world, rows)
    with pytest.raises(ValueError, match="query rows .* top-k"):
        finish(world, rows, out, code, used, plan_rows=1 << 14)


def test_a_wrong_dtype_is_refused():
    world = World(top_k=4, hot_rows=4)
    with pytest.raises(ValueError, match="positions has dtype torch.int64"):
        resolve(world, [row_of(world, [0]).long()])


@pytest.mark.skipif(ON_GPU, reason="values on a device are not looked at")
def test_a_position_twice_in_a_row_is_refused():
    world = World(top_k=4, hot_rows=4)
    rows = [row_of(world, [0, 1]), row_of(world, [7, 2, 7])]
    with pytest.raises(ValueError, match="positions row 1 holds 7 more than once"):
        resolve(world, rows)
