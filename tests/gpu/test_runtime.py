# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""A rank's own code on the device: prefills in parts, and counters without waiting."""

import time
from collections.abc import Callable, Iterator

import pytest
from vllm.v1.hisparse.kernels.tensors import COUNTER_MISSES, COUNTER_STEPS
from vllm.v1.hisparse.runtime.buffers import CounterReader

from runtime_world import RuntimeWorld

HALF = [page % 2 == 0 for page in range(12)]


@pytest.fixture
def world_of(device) -> Iterator[Callable[..., RuntimeWorld]]:
    worlds: list[RuntimeWorld] = []

    def make(**sizes: int) -> RuntimeWorld:
        world = RuntimeWorld(device=device, **sizes)
        worlds.append(world)
        world.tables.use_kernels = True
        world.add("full", [True] * 12, leased=False)
        world.add("mixed", HALF, leased=True)
        world.add("cold", [False] * 11 + [True], leased=True)
        return world

    yield make
    for world in worlds:
        world.host.close()


@pytest.mark.parametrize(
    "counts, sizes, is_whole",
    [
        ({"full": 5}, {}, True),
        ({"mixed": 4, "full": 4, "cold": 1}, {"drafts": 3}, True),
        # Decodes in one part, and staged pages in another.
        ({"mixed": 1, "cold": 9, "full": 7}, {}, False),
        # Pages beyond a lease: counted on the device, and rows fetched in their place.
        ({"cold": 16}, {"topk": 4, "hot_rows": 16}, False),
    ],
)
def test_every_layer_reads_the_rows_it_selects(
    world_of, counts, sizes, is_whole
) -> None:
    world = world_of(**sizes)
    for _ in range(2):
        world.start(counts)
        parts = set(world.attend(world.draw(counts, 12)))
        assert (parts == {1}) == is_whole, parts
    assert not world.buffers.faults.any() and not world.buffers.marks.any()


def test_counters_arrive_without_being_waited_for(world_of) -> None:
    world, counts = world_of(), {"mixed": 1, "cold": 1}
    reader = CounterReader(world.buffers)
    units = range(len(world.units))
    steps, misses = [0 for _ in units], [0 for _ in units]
    stop, taken = time.monotonic() + 30, 0
    while taken < 3 or steps != [6 for _ in units]:
        assert time.monotonic() < stop, steps
        if taken < 3:
            world.start(counts)
            world.attend(world.draw(counts, 12))
        by_unit, faults = reader.take()
        taken += 1
        assert not any(faults)
        for unit, counters in enumerate(by_unit):
            steps[unit] += counters[COUNTER_STEPS]
            misses[unit] += counters[COUNTER_MISSES]
    assert misses == world.buffers.counters[..., COUNTER_MISSES].sum(1).tolist()
    assert all(count > 0 for count in misses)
