# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Fetches ahead and copies behind, on streams of their own (D24, R5).

Side streams are late, the compute stream too, and what must be brought or written is
poisoned before: bytes that arrive in the wrong order are not the right ones. Nothing
waits for the device until the step is over.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from vllm.v1.hisparse.messages import PageCopy
from vllm.v1.hisparse.runtime.ahead import Ahead, SideStream
from vllm.v1.hisparse.runtime.copies import ByteRanges, PageCopier

from graphs import CudaGraph
from runtime_world import RuntimeWorld
from side_streams import delay, late_ahead, late_copies, wait_for
from under_test import needs_gpu

POISON = 0xFF
COUNTS = {"mixed": 4, "cold": 4}


@pytest.fixture
def world_with(device) -> Iterator[Callable[[Ahead], RuntimeWorld]]:
    worlds: list[RuntimeWorld] = []

    def make(ahead: Ahead) -> RuntimeWorld:
        # The last unit has no follower: nothing of it goes ahead.
        world = RuntimeWorld(device=device, ahead=ahead, drafts=3, alone=1)
        worlds.append(world)
        world.tables.use_kernels = True
        world.add("mixed", [page % 2 == 0 for page in range(12)], leased=True)
        world.add("cold", [False] * 11 + [True], leased=True)
        world.add("other", [True] * 4, leased=False)
        return world

    yield make
    for world in worlds:
        world.host.close()


def lease_blocks(world: RuntimeWorld) -> torch.Tensor:
    hot = world.tables.hot
    blocks = torch.cat([hot.hot_blocks.flatten(), hot.overflow_blocks.flatten()])
    return blocks[blocks > 0].long()


def forget_hot_rows(world: RuntimeWorld) -> None:
    """Empty the hot buffers and poison them: every row must be fetched anew."""
    world.tables._reset([0, 1])
    world.slab[lease_blocks(world)] = POISON


def attend(world: RuntimeWorld, topk: torch.Tensor) -> list[torch.Tensor]:
    """All layers, enqueued without waiting; what each of them read."""
    outs = []
    delay(world.device)
    for number, layer in enumerate(world.layers):

        def read(tokens, rows, valid, number=number):
            return world.read(number, rows)

        stride = world.plan.device.rows_per_block
        outs.append(layer.attend(world.batch, topk, stride, read))
    return outs


def wrong_layers(
    world: RuntimeWorld, topk: torch.Tensor, outs: list[torch.Tensor]
) -> list[int]:
    """Layers that did not read the rows they selected."""
    found = enumerate(out.cpu() for out in outs)
    return [n for n, out in found if not torch.equal(out, world.selected(n, topk))]


def step_of(world: RuntimeWorld) -> list[int]:
    """Run a step in which every row must be fetched; the layers that read others."""
    forget_hot_rows(world)
    world.start(COUNTS)
    topk = world.draw(COUNTS, 12)
    return wrong_layers(world, topk, attend(world, topk))


def test_rows_fetched_ahead_are_there_when_their_layer_attends(
    device, world_with
) -> None:
    world = world_with(late_ahead(device))
    for _ in range(2 if device.type == "cpu" else 50):
        assert step_of(world) == []


def test_a_layer_that_does_not_join_reads_poison(device, world_with) -> None:
    """So a missing join shows in the test above."""
    ahead = late_ahead(device)
    world = world_with(ahead)
    # Compiling takes longer than any delay, so the first step shows nothing.
    assert step_of(world) == []
    ahead.join = lambda number: None  # type: ignore[method-assign]
    leaders = {unit.unit.latents[0] for unit in world.units}
    wrong = step_of(world)
    assert wrong and not set(wrong) & leaders


@needs_gpu
def test_a_fetch_that_does_not_wait_for_the_plan_shows(device, world_with) -> None:
    class Unordered(SideStream):
        is_ordered = True

        def start(self, pieces):
            if self.is_ordered:
                return super().start(pieces)
            with torch.cuda.stream(self._stream):
                for piece, end in zip(pieces, self._ends):
                    piece()
                    end.record(self._stream)

    ahead = Unordered(torch.cuda.Stream(device), most=8)
    world = world_with(ahead)
    assert step_of(world) == []
    ahead.is_ordered = False
    assert step_of(world)


class Again:
    """On the CPU, the work itself in the place of its graph."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


def test_a_graph_keeps_the_side_stream_and_its_joins(device, world_with) -> None:
    ahead = SideStream(torch.cuda.Stream(device), 8) if device.type == "cuda" else None
    world = world_with(ahead or late_ahead(device))
    tokens = sum(COUNTS.values())
    topk = torch.full((tokens, 32), -1, dtype=torch.int32, device=device)
    shape = (tokens, 32, world.plan.device.row_bytes)
    outs = [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in world.layers]

    def work() -> None:
        for out, got in zip(outs, attend(world, topk)):
            out.copy_(got)

    world.batch.set_dummy(len(COUNTS))
    world.batch.token_request.fill_(-1)
    graph = Again(work) if device.type == "cpu" else CudaGraph(work)
    for _ in range(3 if device.type == "cpu" else 100):
        forget_hot_rows(world)
        world.start(COUNTS)
        topk.copy_(world.draw(COUNTS, 12))
        for out in outs:
            out.fill_(POISON)
        graph.replay()
        assert wrong_layers(world, topk, outs) == []


# Copies of pages, behind and before ------------------------------------------------


def page_of(world: RuntimeWorld, page: int) -> tuple[PageCopy, torch.Tensor]:
    """A resident page of a request that is in no batch, and its blocks."""
    row = world.state_rows["other"]
    frame = int(world.tables.residency.page_frame[row, page])
    blocks = world.tables.residency.frame_blocks[frame].tolist()
    host_page = int(world.batch.host_table[row, page])
    copy = PageCopy(page, host_page, blocks[0], tuple(blocks[1:]))
    return copy, torch.tensor(blocks).to(world.device)


def copier_of(world: RuntimeWorld) -> PageCopier:
    queues = late_copies(world.device), late_copies(world.device)
    return PageCopier(world.plan.device, world.slab, world.host, *queues)


def host_bytes(world: RuntimeWorld, page_id: int) -> torch.Tensor:
    return torch.cat([layer[page_id] for layer in world.host.layers.values()])


def test_a_write_back_reads_what_was_written_before_it(device, world_with) -> None:
    world = world_with(late_ahead(device))
    assert written_back(world, copier_of(world)) == [1, 2, 3, 4]


def written_back(world: RuntimeWorld, copier: PageCopier) -> list[int]:
    """What the host has of pages that are written just before; 0 for other bytes."""
    pages = [page_of(world, page) for page in range(4)]
    for _, blocks in pages:
        world.slab[blocks] = POISON
    # Copies begin late; what they read is written much later.
    delay(world.device, times=10)
    for number, (_, blocks) in enumerate(pages):
        world.slab[blocks] = number + 1
    copier.write_back([copy for copy, _ in pages])
    assert wait_for(copier.to_host, 4) == [0, 1, 2, 3]
    found = [host_bytes(world, copy.page_id).unique().tolist() for copy, _ in pages]
    return [values[0] if len(values) == 1 else 0 for values in found]


@needs_gpu
def test_a_write_back_that_does_not_wait_for_the_step_shows(device, world_with) -> None:
    world = world_with(late_ahead(device))
    copier = copier_of(world)
    written_back(world, copier)
    start = copier.to_host.start

    def start_behind_nothing(ranges: ByteRanges) -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            start(ranges)

    copier.to_host.start = start_behind_nothing  # type: ignore[method-assign]
    assert written_back(world, copier) != [1, 2, 3, 4]


def test_a_restore_is_there_once_it_is_acknowledged(device, world_with) -> None:
    world = world_with(late_ahead(device))
    copier = copier_of(world)
    copy, blocks = page_of(world, 1)
    world.slab[blocks] = POISON
    copier.restore([copy])
    assert wait_for(copier.to_device, 1) == [1]
    got = world.slab[blocks].cpu()
    size = world.plan.device.latent_page_bytes
    for place in world.plan.device.latents:
        there = got[1 + place.stack, place.byte_offset :][:size]
        assert torch.equal(there, world.host.layers[place.name][copy.page_id])


def test_a_restore_waits_for_what_reads_its_blocks(device, world_with) -> None:
    world = world_with(late_ahead(device))
    copier = copier_of(world)
    copy, blocks = page_of(world, 1)
    world.slab[blocks] = POISON
    delay(device, times=10)
    before = world.slab[blocks]
    copier.restore([copy])
    wait_for(copier.to_device, 1)
    after = world.slab[blocks]
    assert (before == POISON).all() and not (after == POISON).all()


def test_fetches_and_write_backs_of_many_steps_overlap(device, world_with) -> None:
    world = world_with(late_ahead(device))
    copier = copier_of(world)
    pages = [page_of(world, page) for page in range(4)]
    for step in range(2 if device.type == "cpu" else 100):
        copy, blocks = pages[step % 4]
        world.slab[blocks] = step + 1
        copier.write_back([copy])
        assert step_of(world) == []
        wait_for(copier.to_host, 1)
        assert (host_bytes(world, copy.page_id) == step + 1).all(), step
