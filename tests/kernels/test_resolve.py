# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""lookup, assign and fetch together, step by step (D21-D24).

`World.step` compares each step with the references, the OrderedDict oracle and the
bytes; the tests choose the streams.
"""

import numpy as np
import pytest
import torch
from kernels.tensors import COUNTER_HITS, COUNTER_MISSES, COUNTER_OVERFLOW

from world import World, row_of, stream


@pytest.mark.parametrize("query_rows", [1, 2, 4])
@pytest.mark.parametrize("top_k, hot_rows", [(1, 1), (33, 33), (33, 66), (64, 128)])
def test_a_drifting_stream_with_changing_residency(top_k, hot_rows, query_rows, races):
    # One token per program, as on a GPU.
    world = World(top_k=top_k, hot_rows=hot_rows, query_rows=query_rows, pages=13)
    residency = (0.0, 0.5, 0.9, 0.2)
    stream(world, 4, keep=0.6, residency=residency, padding=0.1, tokens=1)
    assert world.counters[:, COUNTER_MISSES].sum() > 0


@pytest.mark.parametrize(
    "requests, query_rows, tokens", [(3, 2, 1), (3, 2, 4), (33, 1, None)]
)
def test_a_batch_with_padded_requests_and_tokens(requests, query_rows, tokens, races):
    world = World(
        top_k=33, hot_rows=66, requests=requests, query_rows=query_rows, pages=5
    )
    stream(
        world,
        2,
        keep=0.7,
        residency=(0.3,),
        padding=0.1,
        pad_requests=1,
        pad_tokens=3,
        tokens=tokens,
    )


@pytest.mark.parametrize(
    "hot_rows, query_rows, requests",
    [(2048, 1, 1), (4096, 4, 1), (8192, 2, 1), (4096, 1, 3)],
)
def test_production_sizes(hot_rows, query_rows, requests):
    world = World(
        top_k=2048,
        hot_rows=hot_rows,
        query_rows=query_rows,
        requests=requests,
        pages=300,
        block_size=64,
        stacks=2,
        unit_stacks=(1,),
        seed=hot_rows,
    )
    stream(world, 2, keep=0.8, residency=(0.1, 0.3))


@pytest.mark.parametrize("kind", ["identical", "disjoint", "half", "one shared"])
def test_query_rows_that_overlap(kind, races):
    world = World(top_k=33, hot_rows=66, query_rows=4, pages=13)
    for first in (0, 7):
        step = {"identical": 0, "disjoint": 33, "half": 16, "one shared": 32}[kind]
        # Shuffled, so that the order of the plan tells which row's entry counts.
        starts = [first + r * step for r in range(4)]
        rows = [row_of(world, world.rng.permutation(33) + start) for start in starts]
        world.step([rows])
    union = 33 + 3 * step + 7
    counted = world.counters[0, COUNTER_MISSES] - world.counters[0, COUNTER_OVERFLOW]
    assert counted <= union
    if kind == "identical":
        assert counted == union and world.counters[0, COUNTER_OVERFLOW] == 0


def test_duplicates_of_overflow_rows_share_them(races):
    # 4 rows of 33 with 66 hot rows: the third row's misses overflow, the fourth row
    # repeats them in another order.
    world = World(top_k=33, hot_rows=66, query_rows=4, pages=13, overflow_rows=33)
    rows = [row_of(world, np.arange(33) + 33 * r) for r in (0, 1, 2, 2)]
    rows[3] = rows[3].flip(0)
    physical = world.step([rows], reverse_fetch=True)
    assert world.counters[0, COUNTER_OVERFLOW] == 33
    assert torch.equal(physical[:, 2], physical[:, 3].flip(1))


def test_union_above_the_hot_buffer_with_hits_in_it(races):
    world = World(top_k=33, hot_rows=33, query_rows=2, pages=13)
    world.step([[row_of(world, range(20)), row_of(world, range(20))]])
    rows = [row_of(world, range(10, 43)), row_of(world, range(50, 83))]
    world.step([rows])
    # 10 hits keep their slots, 23 misses take the others, the rest overflows.
    assert world.counters[0, COUNTER_HITS] == 10
    assert world.counters[0, COUNTER_OVERFLOW] == 33


def test_misses_are_filled_in_several_tiles(races):
    world = World(top_k=64, hot_rows=64, query_rows=2, pages=13)
    stream(world, 2, keep=0.5, residency=(0.1,), tile=16)


@pytest.mark.parametrize("hot_rows", [33, 64, 66])
def test_a_hot_buffer_larger_than_a_tile(hot_rows, races):
    world = World(top_k=33, hot_rows=hot_rows, query_rows=2, pages=13, overflow_rows=33)
    residency = (0.1, 0.3, 0.1)
    stream(world, 3, keep=0.8, residency=residency, padding=0.2, lru_tile=16)
    assert world.counters[0, COUNTER_HITS] > 0


def test_the_largest_hot_buffer():
    world = World(
        top_k=1024, hot_rows=32767, pages=600, block_size=64, stacks=1, unit_stacks=(0,)
    )
    stream(world, 2, keep=0.5, residency=(0.1,))


def test_only_padding_changes_nothing_but_the_step_count():
    world = World(top_k=33, hot_rows=66, query_rows=2)
    order = world.unit.order.clone()
    world.step([[row_of(world, []), row_of(world, [])]])
    assert torch.equal(world.unit.order, order)
    assert world.counters[0].tolist() == [0, 0, 0, 0, 1]


def test_all_resident_leaves_the_hot_buffer_alone():
    world = World(top_k=33, hot_rows=66, query_rows=2)
    world.set_residency(1.0)
    stream(world, 2, keep=0.5, residency=(1.0,))
    assert world.counters[0].tolist() == [0, 0, 0, 0, 2]
    assert (world.unit.slot_pos == -1).all()


def test_all_hits_fetch_nothing_and_keep_their_order():
    world = World(top_k=33, hot_rows=33)
    row = world.draw()
    world.step([[row]])
    order = world.unit.order.clone()
    world.step([[row.flip(0)]])
    assert world.plan.count[0] == 0
    assert torch.equal(world.unit.order, order)


def test_all_misses_replace_a_full_buffer():
    world = World(top_k=33, hot_rows=33, pages=5)
    for first in (0, 33):
        world.step([[row_of(world, np.arange(33) + first)]])
    assert world.counters[0].tolist() == [0, 66, 0, 0, 2]


def test_the_least_recently_used_row_goes_first():
    world = World(top_k=2, hot_rows=3)
    for positions in ([0, 1], [2], [0], [3]):
        world.step([[row_of(world, positions)]])
    held = set(world.unit.slot_pos[world.mixed_of[0]].tolist())
    assert held == {0, 2, 3}


def test_a_restored_page_is_read_in_place_and_its_hot_rows_age():
    world = World(top_k=4, hot_rows=8)
    hot_row = world.step([[row_of(world, [0, 1])]])[:, 0, :2]
    world.restore(0, 0)
    resident_row = world.step([[row_of(world, [0, 1])]])[:, 0, :2]
    assert not torch.equal(hot_row, resident_row)
    world.evict(0, 0)
    assert torch.equal(world.step([[row_of(world, [0, 1])]])[:, 0, :2], hot_row)
    assert world.counters[0, COUNTER_MISSES] == 2
    # Resident rows did not count as uses: 8 others push the stale rows out.
    world.restore(0, 0)
    for first in (16, 20):
        world.step([[row_of(world, np.arange(4) + first)]])
        world.step([[row_of(world, [0, 1])]])
    world.evict(0, 0)
    world.step([[row_of(world, [0, 1])]])
    assert world.counters[0, COUNTER_MISSES] == 12


def test_rows_reused_by_another_request_after_a_reset():
    world = World(top_k=33, hot_rows=66, requests=2)
    stream(world, 2, keep=0.5, residency=(0.2,))
    row = world.draw()
    world.step([[row], [row]])
    world.replace_request(0)
    world.set_residency(0.2)
    world.step([[row], [row]])


def test_batch_rows_differ_from_state_rows_and_change():
    world = World(top_k=16, hot_rows=32, requests=4)
    rows = [[world.draw()] for _ in range(4)]
    for batch in ([0, 1, 2, 3], [3, 1], [2, 0, 3], [1]):
        world.step([rows[request] for request in batch], batch)


def test_a_step_of_many_tokens_fits_the_interpreter():
    # A row of 1,024 entries leaves room for 512 tokens in one program.
    world = World(top_k=1024, hot_rows=16, pages=65, query_rows=1)
    world.set_residency(1.0)
    world.residency.mixed_row.fill_(-1)
    world.step([[world.draw()] * 1025])


def test_padded_requests_get_an_empty_plan():
    world = World(top_k=16, hot_rows=32, requests=3)
    world.step([[world.draw()] for _ in range(3)])
    assert (world.plan.count[:3] > 0).all()
    world.step([[world.draw()]], [1], pad_requests=2)
    assert world.plan.count[1:3].tolist() == [0, 0]
    assert world.plan.hot_count[1:3].tolist() == [0, 0]


def test_a_request_without_a_lease_beside_mixed_ones():
    world = World(top_k=33, hot_rows=66, requests=3)
    for page in range(world.pages):
        world.restore(1, page)
    world.residency.mixed_row[world.state_of[1]] = -1
    for _ in range(2):
        world.step([[world.draw()] for _ in range(3)])
    assert world.counters[1].tolist() == [0] * 5


def test_requests_with_fewer_query_rows_than_the_most():
    world = World(top_k=16, hot_rows=32, requests=3, query_rows=4)
    for lengths in ([1, 4, 2], [3, 1, 1], [0, 2, 4]):
        world.step([[world.draw(0.2) for _ in range(n)] for n in lengths])


def test_counters_count_distinct_rows_and_add_up():
    world = World(top_k=4, hot_rows=4, query_rows=3, overflow_rows=16)
    rows = ([0, 1, 2, 3], [2, 3, 4, 5], [5, 6])
    world.step([[row_of(world, row) for row in rows]])
    # Misses 0..6; 4, 5, 6 overflow; 2, 3 and 5 were claimed by an earlier row.
    assert world.counters[0].tolist() == [0, 7, 3, 3, 1]
    world.step([[row_of(world, [0, 9]), row_of(world, [0])]])
    assert world.counters[0].tolist() == [1, 8, 3, 3, 2]
