# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""fetch_rows on its own: widths, parts, programs, and what it must not touch."""

import pytest
import torch
from kernels.fetch import FetchPart, fetch_rows, fetch_rows_reference
from kernels.tensors import FetchPlan, HotBlocks, Residency

I32 = dict(dtype=torch.int32)


class Case:
    """A random plan for ``requests`` batch rows, the second of them padded."""

    def __init__(self, counts, row_bytes=16, hot_rows=40, overflow_rows=20, seed=0):
        generator = torch.Generator().manual_seed(seed)
        rand = lambda high, *shape: torch.randint(  # noqa: E731
            high, shape, generator=generator, **I32
        )
        requests, stacks, self.block_size = len(counts), 3, 16
        self.hot_rows, self.row_bytes = hot_rows, row_bytes
        widest = hot_rows + overflow_rows
        hot_blocks, over_blocks = -(-hot_rows // 16), -(-overflow_rows // 16)
        lease = stacks * hot_blocks + over_blocks
        blocks = torch.randperm(requests * lease, generator=generator).int() + 1
        blocks = blocks.view(requests, lease)
        self.hot = HotBlocks(
            blocks[:, over_blocks:].reshape(requests, stacks, hot_blocks).contiguous(),
            blocks[:, :over_blocks].contiguous(),
        )
        self.state_row = torch.randperm(requests, generator=generator).int()
        mixed_row = torch.randperm(requests, generator=generator).int()
        empty = torch.zeros((requests, 1), **I32)
        self.residency = Residency(empty, empty, mixed_row)
        self.host = rand(256, 300, row_bytes).to(torch.uint8)
        # Three layers of a block, and a gap.
        self.block_bytes = 3 * 16 * row_bytes + 48
        shape = (1 + blocks.numel(), self.block_bytes)
        self.slab = rand(256, *shape).to(torch.uint8)
        slots = [torch.randperm(hot_rows, generator=generator) for _ in counts]
        over = hot_rows + torch.arange(overflow_rows)
        hot_counts = [min(count, hot_rows, count * 3 // 4) for count in counts]
        plans = [torch.cat([s[:h], over]) for s, h in zip(slots, hot_counts)]
        plans = [torch.nn.functional.pad(p, (0, widest - len(p))) for p in plans]
        self.plan = FetchPlan(
            rand(300, requests, widest),
            torch.stack(plans).int(),
            torch.tensor(counts, **I32),
            torch.tensor(hot_counts, **I32),
        )

    def run(self, function, stack=1, layer=2, **args):
        slab = self.slab.clone()
        function(
            self.plan, self.state_row, self.residency, self.hot, self.host, slab,
            stack=stack, layer_offset=layer * 16 * self.row_bytes,
            hot_rows=self.hot_rows, block_size=16, **args,
        )  # fmt: skip
        return slab


@pytest.mark.parametrize("row_bytes", [16, 576, 656, 1152, 2304])
@pytest.mark.parametrize("layer", [0, 2])
def test_rows_of_any_width_arrive_and_nothing_else_changes(row_bytes, layer, races):
    case = Case([7, 0, 33], row_bytes)
    got = case.run(fetch_rows, layer=layer)
    assert torch.equal(got, case.run(fetch_rows_reference, layer=layer))
    assert (got != case.slab).any()


@pytest.mark.parametrize("part", FetchPart)
def test_parts_copy_hot_and_overflow_rows_apart(part, races):
    case = Case([40, 3, 0, 1])
    got = case.run(fetch_rows, part=part, stack=2)
    assert torch.equal(got, case.run(fetch_rows_reference, part=part, stack=2))
    changed = (got != case.slab).any(1).nonzero().flatten()
    overflow = torch.isin(changed.int(), case.hot.overflow_blocks)
    assert overflow.any() == (part is not FetchPart.HOT)
    assert (~overflow).any() == (part is not FetchPart.OVERFLOW)


@pytest.mark.parametrize("requests", [1, 3, 33])
@pytest.mark.parametrize("programs", [1, 2, 7, 32])
def test_any_number_of_programs_shares_the_work(requests, programs, races):
    counts = [(11 * i + 5) % 41 for i in range(requests)]
    case = Case(counts, row_bytes=48)
    args = dict(programs=programs, tile=16)
    for part in FetchPart:
        got = case.run(fetch_rows, part=part, **args)
        assert torch.equal(got, case.run(fetch_rows_reference, part=part))


def test_an_empty_plan_reads_no_request_state():
    case = Case([0, 0])
    case.residency.mixed_row.fill_(-(1 << 30))
    case.state_row.fill_(-1)
    assert torch.equal(case.run(fetch_rows), case.slab)


def test_a_row_that_is_not_whole_chunks_is_refused():
    case = Case([1], row_bytes=24)
    with pytest.raises(ValueError, match="row bytes is 24, not a multiple of 16"):
        case.run(fetch_rows)


def test_a_layer_that_leaves_its_block_is_refused():
    case = Case([1])
    with pytest.raises(ValueError, match="end of the layer in a block is 1024"):
        case.run(fetch_rows, layer=3)
