# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Slot mappings of the step and the indexer's block table (D9, D16)."""

import pytest
import torch
from kernels.slots import (
    gather_indexer_table,
    gather_indexer_table_reference,
    slot_mappings,
    slot_mappings_reference,
)

from world import World

I32 = dict(dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("shape", [{}, {"tile": 4, "groups_per_program": 1}])
def test_tokens_are_written_where_their_page_is(dtype, block_size, shape, races):
    world = World(top_k=1, hot_rows=1, requests=3, block_size=block_size)
    world.set_residency(0.7)
    # The third batch row is padded but has tokens; 3 tokens are behind the batch.
    lengths = [1, 9, 2, 4]
    starts = torch.tensor([0, *lengths], **I32).cumsum(0).int()
    states = torch.tensor([*world.state_of[:2], -1, world.state_of[2]], **I32)
    positions = torch.arange(20, dtype=dtype) * 7 % (8 * block_size)
    got = torch.full((4, 19), 12345, dtype=torch.int64)
    want = got.clone()
    owners = [torch.full((19,), 12345, **I32) for _ in range(2)]
    args = (positions, starts, states, world.residency)
    slot_mappings(*args, got, owners[0], block_size=block_size, **shape)
    slot_mappings_reference(*args, want, owners[1], block_size=block_size)
    assert torch.equal(got, want) and torch.equal(*owners)
    assert owners[0].tolist() == [0] + [1] * 9 + [-1] * 2 + [3] * 4 + [-1] * 3
    assert (got[:, 16:] == -1).all() and (got[:, 10:12] == -1).all()
    assert (got[:, :10] >= 0).any() and (got[:, :10] == -1).any()
    for token in range(1, 10):
        page, offset = divmod(int(positions[token]), block_size)
        frame = world.frame(1, page)
        if frame >= 0:
            blocks = world.residency.frame_blocks[frame]
            assert got[:, token].tolist() == [
                int(block) * block_size + offset for block in blocks
            ]


def test_a_position_behind_the_table_has_no_slot():
    world = World(top_k=1, hot_rows=1)
    # The next state row begins where the table of state row 0 ends.
    world.residency.page_frame.fill_(1)
    got = torch.zeros((4, 2), dtype=torch.int64)
    slot_mappings(
        torch.tensor([127, 128]), torch.tensor([0, 2], **I32),
        torch.tensor([0], **I32), world.residency, got, torch.zeros(2, **I32),
        block_size=16,
    )  # fmt: skip
    assert (got[:, 0] >= 0).all() and (got[:, 1] == -1).all()


@pytest.mark.parametrize("shape", [{}, {"tile": 2, "programs_per_request": 3}])
def test_the_indexer_sees_the_blocks_of_host_only_pages_too(shape, races):
    world = World(top_k=1, hot_rows=1, requests=3, pages=13)
    world.set_residency(1.0)
    entries = world.residency.page_frame
    evicted = entries[world.state_of[0], 3:7].clone()
    entries[world.state_of[0], 3:7] = -2 - evicted
    entries[world.state_of[0], 7] = -1
    states = torch.tensor([world.state_of[1], -1, world.state_of[0]], **I32)
    counts = torch.full((6,), 13, **I32)
    counts[world.state_of[1]] = 5
    got = torch.full((4, 11), 12345, **I32)
    want = got.clone()
    gather_indexer_table(states, counts, world.residency, got, **shape)
    gather_indexer_table_reference(states, counts, world.residency, want)
    assert torch.equal(got, want)
    blocks = world.residency.frame_blocks[:, 0]
    assert torch.equal(got[2, 3:7], blocks[evicted.long()])
    assert got[2, 7] == 0 and (got[1] == 0).all()
    # Behind the request's pages, and behind the batch, nothing is written.
    assert (got[0, 5:] == 12345).all() and (got[3] == 12345).all()
    assert (got[0, :5] > 0).all()
