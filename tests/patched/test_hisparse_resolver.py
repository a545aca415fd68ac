# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Decodes and prefills of resident and mixed requests read the right bytes (D22-26)."""

import pytest
import torch

pytest.importorskip("vllm", reason="needs the patched vLLM")

from vllm.v1.hisparse.runtime.batch import StepShape  # noqa: E402

from launch_recorder import LaunchRecorder, RecordedLaunch  # noqa: E402
from runtime_world import RuntimeWorld  # noqa: E402

HALF = [page % 2 == 0 for page in range(12)]


def world_of(seed: int = 0, **sizes: int) -> RuntimeWorld:
    world = RuntimeWorld(seed, **sizes)
    world.add("full", [True] * 12, leased=False)
    world.add("mixed", HALF, leased=True)
    world.add("cold", [False] * 11 + [True], leased=True)
    return world


@pytest.mark.parametrize("use_kernels", [False, True])
def test_resident_requests_are_resolved_in_one_part(use_kernels: bool) -> None:
    world = world_of()
    world.tables.use_kernels = use_kernels
    counts = {"full": 5}
    world.start(counts)
    assert not world.batch.shape.is_mixed
    assert set(world.attend(world.draw(counts, 12))) == {1}


@pytest.mark.parametrize("drafts", [0, 3])
def test_decoding_requests_share_one_part_step_after_step(drafts: int) -> None:
    world = world_of(drafts=drafts)
    counts = {"mixed": 1 + drafts, "full": 1 + drafts, "cold": 1}
    for _ in range(4):
        world.start(counts)
        assert set(world.attend(world.draw(counts, 12))) == {1}


def test_a_prefill_behind_decodes_is_staged_as_a_whole() -> None:
    world = world_of()
    assert world.plan.lease_blocks >= 11
    counts = {"mixed": 1, "cold": 9, "full": 7}
    world.start(counts)
    assert [r.request for r in world.batch.shape.tail] == [1, 2]
    assert set(world.attend(world.draw(counts, 12))) == {2}
    assert not world.buffers.marks.any()


def picks(world: RuntimeWorld, *pages: range) -> torch.Tensor:
    """A prefill of 16 tokens for each range, which select among its pages."""
    rows = []
    for span in pages:
        positions = torch.arange(16 * span.start, 16 * span.stop)
        for _ in range(16):
            order = torch.randperm(len(positions), generator=world.random)
            rows.append(positions[order[: world.plan.hot.topk]].int())
    return torch.stack(rows)


def test_pages_beyond_a_lease_split_the_prefill() -> None:
    world = world_of(topk=4, hot_rows=16)
    assert world.plan.lease_blocks == 4
    for parts, pages in ((2, [range(4), range(4, 8)]), (1, [range(4), range(4)])):
        world.start({"cold": 32})
        assert set(world.attend(picks(world, *pages))) == {parts}


def test_rows_are_fetched_where_they_are_less_than_the_pages() -> None:
    """16 tokens select 64 rows, a lease's 4 pages have as many."""
    world = world_of(topk=4, hot_rows=16)
    counted: list[int] = []
    stage = world.units[0]._staging._stage

    def count(batch, topk, span, stride, is_sure):
        counted.append(span.tokens.stop - span.tokens.start)
        return stage(batch, topk, span, stride, is_sure)

    world.units[0]._staging._stage = count  # type: ignore[method-assign]
    world.start({"cold": 64})
    pages = [range(4), range(11), range(4), range(4)]
    assert set(world.attend(picks(world, *pages))) == {64}
    # Neither halved further, nor staged behind what is not.
    assert counted == [64, 64, 32, 16, 16]


@pytest.mark.parametrize("is_staged", [True, False])
def test_a_long_prefill_takes_no_memory_and_leaves_none(is_staged: bool) -> None:
    world = world_of()
    if not is_staged:
        for unit in world.units:
            unit._staging.capacity = 2
    counts = {"mixed": 1, "cold": 60}
    world.start(counts)
    topk = world.draw(counts, 12)
    memory = set()

    def attention(tokens, rows, valid):
        memory.add(rows.untyped_storage().data_ptr())
        return rows[:, 0]

    for number, layer in enumerate(world.layers):
        layer.attend(world.batch, topk, 1, attention)
        unit = world.units[world.plan.device.latents[number].unit]
        assert bool(unit.parts) == (number != unit.unit.latents[-1])
    assert memory == {world.buffers._rows.untyped_storage().data_ptr()}


def test_a_token_that_touches_more_pages_than_a_lease_has_goes_the_slow_way() -> None:
    world = world_of(topk=32, hot_rows=32)
    world.units[0]._staging.capacity = world.units[1]._staging.capacity = 3
    counts = {"full": 1, "mixed": 6, "cold": 5}
    for _ in range(2):
        world.start(counts)
        topk = world.draw(counts, 12)
        topk[2] = torch.arange(32)  # this one would fit: two pages
        assert set(world.attend(topk)) == {1 + 6 + 5}


def test_hot_rows_that_staging_wrote_over_are_not_found_again() -> None:
    world = world_of()
    decode, prefill = {"cold": 1}, {"cold": 8}
    topk = world.draw(decode, 12)
    for counts in (decode, prefill, decode):
        world.start(counts)
        world.attend(topk if counts is decode else world.draw(counts, 12))


@pytest.mark.parametrize("slow_unit", [0, 1])
def test_one_unit_may_stage_where_the_other_has_hot_rows(slow_unit: int) -> None:
    """They share the lease: what one finds hot, the other has written over."""
    world = world_of()
    world.units[slow_unit]._staging.capacity = 3
    decode, prefill = {"cold": 1}, {"cold": 2}
    topk = world.draw(prefill, 12)
    for counts in (decode, prefill, decode):
        world.start(counts)
        num_parts = world.attend(topk[: counts["cold"]])
    assert set(num_parts) == {1}
    world.start(prefill)
    assert set(world.attend(topk)) == {1, 2}


def test_tokens_behind_the_batch_are_zero_and_touch_nothing() -> None:
    world = world_of()
    counts = {"mixed": 1, "cold": 4}
    world.start(counts)
    topk = torch.cat([world.draw(counts, 12), torch.arange(32).int().expand(3, -1)])
    world.batch.token_request[5:8] = -1
    want = topk.clone()
    want[5:] = -1
    seen = []

    def read(tokens, rows, valid):
        seen.append(tokens)
        return rows

    out = world.layers[0].attend(world.batch, topk, 1, read)
    assert (out[5:] == 0).all() and len(seen) == 2
    counts = {"mixed": 1}
    world.start(counts)
    topk = torch.cat([world.draw(counts, 12), torch.arange(32).int().expand(3, -1)])
    before = world.buffers.counters.sum(1).clone()
    out = world.layers[0].attend(world.batch, topk, 1, read)
    assert (out[1:] == -1).all()
    added = (world.buffers.counters.sum(1) - before)[0]
    assert added[1] <= 32


def compiled_for(launch: RecordedLaunch) -> tuple[str, int | None]:
    """Kernel, and the number of the unit's stacks: the rest is the same for all."""
    return launch.name, launch.sizes.get("NS")


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_warm_up_launches_what_mixed_prefills_do_and_leaves_no_trace(drafts) -> None:
    world = RuntimeWorld(drafts=drafts)
    world.add("first", [False] * 12, leased=True)
    tables, buffers = world.tables, world.buffers
    kept = [world.slab, buffers.used, buffers.counters, buffers.faults, buffers.marks]
    kept += list(tables._hot_state)
    before = [tensor.clone() for tensor in kept]
    with LaunchRecorder(run=True) as recorder:
        for unit in world.units:
            leader = world.layers[unit.unit.latents[0]]
            unit.warm_up(world.batch, leader._memory)
        tables.warm_up()
    assert all(map(torch.equal, kept, before))
    assert not any(unit.parts for unit in world.units)
    warmed = set(map(compiled_for, recorder.launches))
    add = {"cold": ([False] * 11 + [True], True), "slow": ([False] * 12, True)}
    for name, (resident, leased) in add.items():
        world.add(name, resident, leased)
    with LaunchRecorder(run=True) as recorder:
        for capacity in (world.plan.lease_blocks, 2):
            for unit in world.units:
                unit._staging.capacity = capacity
            counts = {"cold": 5, "slow": 6}
            world.start(counts)
            world.attend(world.draw(counts, 12))
    launched = set(map(compiled_for, recorder.launches)) - {("_slots_kernel", None)}
    assert launched == warmed and len(launched) == 8 + 3  # two units, of 3 and 2 stacks


def test_a_dummy_batch_resolves_to_padding() -> None:
    world = world_of()
    world.start({"mixed": 1, "cold": 2})
    world.batch.set_dummy(3)
    topk = torch.arange(32).int().expand(3, -1).contiguous()
    out = world.layers[0].attend(world.batch, topk, 1, lambda t, rows, v: rows)
    assert (out == -1).all() and not world.buffers.faults.any()
    assert not world.buffers.counters.any()


@pytest.mark.parametrize(
    "counts, leased, want",
    [
        ([1, 1], [False, False], StepShape(False)),
        ([1, 9], [True, False], StepShape(True)),
        ([2, 1], [False, True], StepShape(True)),
    ],
)
def test_only_long_mixed_requests_make_a_tail(counts, leased, want) -> None:
    assert StepShape.of(counts, leased, [0, 0], max_query_rows=1) == want


def test_the_tail_begins_with_the_first_long_mixed_request() -> None:
    shape = StepShape.of(
        [1, 9, 8, 1], [True, False, True, True], [3, 0, 5, 7], max_query_rows=4
    )
    tail = [(r.request, r.first, r.last, r.host_pages) for r in shape.tail]
    assert tail == [(2, 10, 18, 5), (3, 18, 19, 7)]
    assert shape.is_mixed and shape.decoding() == StepShape(True)
