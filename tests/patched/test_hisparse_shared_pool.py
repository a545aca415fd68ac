# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""One host pool for the ranks of a node; here the ranks are threads (D19)."""

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs the patched vLLM")

from vllm.v1.hisparse import host_memory  # noqa: E402
from vllm.v1.hisparse.glue import worker as glue_worker  # noqa: E402
from vllm.v1.hisparse.messages import PageCopy  # noqa: E402
from vllm.v1.hisparse.runtime import host_pool, shared_memory  # noqa: E402
from vllm.v1.hisparse.runtime.copies import PageCopier  # noqa: E402
from vllm.v1.hisparse.runtime.cpu_copies import CpuCopies  # noqa: E402
from vllm.v1.hisparse.runtime.host_pool import HostPool, share  # noqa: E402
from vllm.v1.hisparse.runtime.shared_memory import zeroed_memory  # noqa: E402

from runtime_world import RuntimeWorld, small_plan  # noqa: E402

PLAN = small_plan()
DEADLINE_S = 20


class Thread:
    """A rank among other threads, each on its node."""

    def __init__(
        self, rank: int, nodes: str, barrier: threading.Barrier, values: list
    ) -> None:
        self.rank, self.is_on = rank, nodes[rank]
        self.node = [n for n, place in enumerate(nodes) if place == nodes[rank]]
        self._barrier, self._values = barrier, values

    def exchange(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


def on_ranks(nodes: str, work: Callable[[Thread], Any]) -> list[Any]:
    """What each rank returns, or raises; all of them end."""

    def run(rank: Thread) -> Any:
        try:
            return work(rank)
        except RuntimeError as error:
            return error

    size = len(nodes)
    barrier, values = threading.Barrier(size, timeout=DEADLINE_S), [None] * size
    ranks = [Thread(rank, nodes, barrier, values) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, ranks))


def files() -> set[Path]:
    return set(host_memory.SHARED.glob("hisparse-*"))


# --- memory -------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", ["aaa", "aabb", "abab"])
def test_ranks_of_a_node_have_the_same_memory_and_its_file_no_name(nodes: str) -> None:
    before = files()
    memories = on_ranks(nodes, lambda rank: zeroed_memory(1 << 20, rank))
    assert files() == before
    for number, (node, memory) in enumerate(zip(nodes, memories)):
        assert bytes(memory) == bytes(1 << 20)
        memory[number] = 7
        sharers = [m for m, other in zip(memories, nodes) if other == node]
        assert all(m[number] == 7 for m in sharers)
        for m in memories:
            m[number] = 0


@pytest.mark.parametrize("nodes", ["a", "ab"])
def test_a_rank_alone_on_its_node_has_memory_of_its_own(
    nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_create", None)
    for memory in on_ranks(nodes, lambda rank: zeroed_memory(1 << 20, rank)):
        assert bytes(memory) == bytes(1 << 20)
        memory[0] = 1


def assert_all_raise(results: list[Any], *parts: str) -> None:
    assert [type(result) for result in results] == [RuntimeError] * len(results)
    assert all(part in str(result) for part in parts for result in results), results


@pytest.mark.parametrize("nodes", ["aa", "aabb", "abb", "aab"])
def test_no_rank_goes_on_where_memory_is_short_on_one_node(
    nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=64 << 20, free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    before = files()
    results = on_ranks(nodes, lambda rank: zeroed_memory(2 << 20, rank))
    assert_all_raise(results, "host_pool_gib", "--shm-size")
    assert files() == before


def test_no_rank_goes_on_where_no_file_can_be_made(monkeypatch) -> None:
    monkeypatch.setattr(shared_memory, "SHARED", Path("/nowhere"))
    results = on_ranks("aa", lambda rank: zeroed_memory(2 << 20, rank))
    assert_all_raise(results, "HiSparse: the host pool cannot be made in /nowhere")


@pytest.mark.parametrize("nodes", ["aa", "aabb", "abb"])
def test_no_rank_goes_on_where_one_cannot_map_the_file(nodes: str) -> None:
    """As in a container with a /dev/shm of its own."""
    before, last = files(), len(nodes) - 1

    def without_file(rank: Thread) -> Any:
        exchange, calls = rank.exchange, []

        def misled(value: Any) -> list[Any]:
            calls.append(value)
            values = exchange(value)
            if rank.rank == last and len(calls) == 1:
                values[rank.node[0]] = "/dev/shm/hisparse-not-there", ""
            return values

        rank.exchange = misled  # type: ignore[method-assign]
        return zeroed_memory(1 << 20, rank)

    assert_all_raise(on_ranks(nodes, without_file), "hisparse-not-there")
    assert files() == before


def test_the_file_goes_when_a_rank_is_ended_while_it_has_a_name() -> None:
    before = files()
    named: list[Path] = []

    class Ended(Thread):
        def exchange(self, value: Any) -> list[Any]:
            named.extend(files() - before)
            raise RuntimeError("ended")

    with pytest.raises(RuntimeError, match="ended"):
        zeroed_memory(1 << 20, Ended(0, "aa", threading.Barrier(1), [None]))
    assert len(named) == 1 and files() == before


# --- the pool -------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 8, 16, 150])
def test_every_layer_is_one_ranks_and_ranks_have_even_parts(count: int) -> None:
    """At GLM-5.3's sizes: 79 latents, 22 indexers."""
    sizes = [41_984] * 79 + [8_448] * 22
    node = range(count)
    ranks = [SimpleNamespace(rank=rank, node=node) for rank in node]
    parts = [share(sizes, rank) for rank in ranks]
    assert [i for part in parts for i in part] == list(range(len(sizes)))
    most = max(sum(sizes[i] for i in part) for part in parts)
    assert most <= sum(sizes) / count + max(sizes)


def test_a_rank_touches_its_part_and_pins_all_after_everybody_has_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[tuple] = []
    touch = host_pool.touch

    def slow_touch(buffer: torch.Tensor, cpus: set[int], progress: Any) -> None:
        time.sleep(0.2 if 1 in cpus else 0)
        touch(buffer, cpus, progress)
        log.append(("touched", buffer.numel()))

    class Registrar:
        def pin(self, address: int, num_bytes: int) -> int:
            log.append(("pinned", num_bytes))
            return 0

        def unpin(self, address: int) -> int:
            return 0

    monkeypatch.setattr(host_pool, "touch", slow_touch)

    def make(rank: Thread) -> HostPool:
        return HostPool(
            PLAN.device, PLAN.num_pages, Registrar(), {rank.rank}, sharers=rank
        )

    pools = on_ranks("aa", make)
    total = PLAN.num_pages * PLAN.device.host_page_bytes
    assert [what for what, _ in log] == ["touched", "touched", "pinned", "pinned"]
    assert [size for what, size in log if what == "pinned"] == [total, total]
    touched = [size for what, size in log if what == "touched"]
    assert sum(touched) == total and min(touched) > total / 4
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("nodes", ["aa", "abb"])
def test_no_rank_goes_on_where_one_cannot_touch_its_part(
    nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(buffer: torch.Tensor, cpus: set[int], progress: Any) -> None:
        if cpus == {1}:
            raise RuntimeError("can't start new thread")

    registrar = SimpleNamespace(pin=lambda *_: pytest.fail("pinned"))
    monkeypatch.setattr(host_pool, "touch", failing)
    results = on_ranks(
        nodes,
        lambda rank: HostPool(
            PLAN.device, PLAN.num_pages, registrar, {rank.rank}, sharers=rank
        ),
    )
    assert_all_raise(results, "HiSparse: the host pool cannot be touched: can't start")


def test_ranks_write_back_a_part_each_and_restore_all() -> None:
    """Frames are filled alike, as the ranks compute the same latents."""
    num_stacks = PLAN.device.num_stacks
    copy = PageCopy(5, 3, 9, tuple(range(2, 2 + num_stacks)))
    worlds = [RuntimeWorld(seed=1) for _ in range(2)]
    pools = on_ranks(
        "aa", lambda rank: HostPool(PLAN.device, PLAN.num_pages, sharers=rank)
    )
    copiers = [
        PageCopier(PLAN.device, world.slab, pool, CpuCopies(), CpuCopies())
        for world, pool in zip(worlds, pools)
    ]
    for world in worlds:
        filler = torch.Generator().manual_seed(3)
        world.slab.random_(1, 256, generator=filler)
    was = worlds[0].slab.clone()
    names = {layer.name for layer in PLAN.device.host_layers}
    assert pools[0].own_layers | pools[1].own_layers == names
    for index, copier in enumerate(copiers):
        copier.write_back([copy])
        assert copier.poll() == ([5], [])
        there = {n for n in names if pools[0].layers[n][3].all()}
        parts = pools[: index + 1]
        assert there == frozenset().union(*(pool.own_layers for pool in parts))
    written = [copier.take_bytes()[1] for copier in copiers]
    assert sum(written) == PLAN.device.host_page_bytes and min(written) > 0
    for world, copier in zip(worlds, copiers):
        world.slab.zero_()
        copier.restore([copy])
        assert copier.poll() == ([5], [])
        assert copier.take_bytes() == (PLAN.device.host_page_bytes, 0)
        restored = world.slab != 0
        assert torch.equal(world.slab[restored], was[restored])
        assert restored.sum() == PLAN.device.host_page_bytes


def test_a_rank_without_layers_acknowledges_at_once() -> None:
    many = range(len(PLAN.device.host_layers) * 4)
    sharers = SimpleNamespace(rank=len(many) // 2, node=many)
    assert not share([1, 1], sharers)  # type: ignore[arg-type]
    world = RuntimeWorld()
    world.host.own_layers = frozenset()
    queues = CpuCopies(), CpuCopies()
    copier = PageCopier(PLAN.device, world.slab, world.host, *queues)
    blocks = tuple(range(2, 2 + PLAN.device.num_stacks))
    before = world.host.buffer.clone()
    copier.write_back([PageCopy(5, 3, 9, blocks), PageCopy(6, 4, 10, blocks)])
    assert copier.poll() == ([5, 6], []) and copier.poll() == ([], [])
    assert torch.equal(world.host.buffer, before)
    assert copier.take_bytes() == (0, 0)


# --- who shares -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "nodes", ["aaaa", "aabb", "abab", "abbb", "a"], ids=lambda nodes: nodes
)
def test_the_ranks_of_a_node_share(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_there(group: Any, source: int) -> list[bool]:
        assert len(nodes) > 1
        return [node == nodes[source] for node in nodes]

    def gather(values: list, value: Any, group: Any) -> None:
        values[:] = [f"{value} of {rank}" for rank in range(len(nodes))]

    monkeypatch.setattr(glue_worker, "in_the_same_node_as", is_there)
    distributed = glue_worker.torch.distributed
    monkeypatch.setattr(distributed, "all_gather_object", gather)
    for rank, node in enumerate(nodes):
        group = SimpleNamespace(
            cpu_group="cpu", world_size=len(nodes), rank_in_group=rank
        )
        sharers = glue_worker.Ranks(group)  # type: ignore[arg-type]
        own = [other for other, place in enumerate(nodes) if place == node]
        assert (sharers.rank, sharers.node) == (rank, own)
        words = [f"word of {other}" for other in range(len(nodes))]
        assert sharers.exchange("word") == (words if len(nodes) > 1 else ["word"])
