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
from vllm.v1.hisparse.runtime import host_pool  # noqa: E402
from vllm.v1.hisparse.runtime.copies import PageCopier  # noqa: E402
from vllm.v1.hisparse.runtime.cpu_copies import CpuCopies  # noqa: E402
from vllm.v1.hisparse.runtime.host_pool import HostPool, share  # noqa: E402
from vllm.v1.hisparse.runtime.shared_memory import zeroed_memory  # noqa: E402

from runtime_world import RuntimeWorld, small_plan  # noqa: E402

PLAN = small_plan()
DEADLINE_S = 20


class Thread:
    """A rank that shares with other threads."""

    def __init__(self, index: int, barrier: threading.Barrier, values: list) -> None:
        self.index, self.count = index, barrier.parties
        self._barrier, self._values = barrier, values

    def exchange(self, value: Any) -> list[Any]:
        self._values[self.index] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


def on_ranks(count: int, work: Callable[[Thread], Any]) -> list[Any]:
    """What each rank returns, or raises."""

    def run(rank: Thread) -> Any:
        try:
            return work(rank)
        except RuntimeError as error:
            return error

    barrier, values = threading.Barrier(count, timeout=DEADLINE_S), [None] * count
    ranks = [Thread(index, barrier, values) for index in range(count)]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, ranks))


def files() -> set[Path]:
    return set(host_memory.SHARED.glob("hisparse-*"))


# --- memory -------------------------------------------------------------------------


def test_ranks_have_the_same_memory_and_its_file_no_name() -> None:
    before = files()
    first, second, third = on_ranks(3, lambda rank: zeroed_memory(1 << 20, rank))
    assert files() == before
    assert bytes(first) == bytes(1 << 20)
    second[12345] = 7
    assert first[12345] == third[12345] == 7


def test_one_rank_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SHARED", Path("/nowhere"))
    (alone,) = on_ranks(1, lambda rank: zeroed_memory(1 << 20, rank))
    assert bytes(alone) == bytes(1 << 20)


def test_no_rank_goes_on_where_memory_is_short(monkeypatch) -> None:
    usage = SimpleNamespace(total=64 << 20, free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    before = files()
    errors = on_ranks(2, lambda rank: zeroed_memory(2 << 20, rank))
    assert len(errors) == 2 and files() == before
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert "host_pool_gib" in str(error) and "--shm-size" in str(error)


@pytest.mark.parametrize("slow", [0, 1])
def test_no_rank_goes_on_where_one_cannot_map_the_file(slow: int) -> None:
    """As in a container with a /dev/shm of its own."""
    before = files()

    def without_file(rank: Thread) -> Any:
        exchange, calls = rank.exchange, []

        def misled(value: Any) -> list[Any]:
            calls.append(value)
            if rank.index == slow and len(calls) == 2:
                time.sleep(0.1)
            values = exchange(value)
            is_first = rank.index == 1 and len(calls) == 1
            return [("/dev/shm/hisparse-not-there", "")] if is_first else values

        rank.exchange = misled  # type: ignore[method-assign]
        return zeroed_memory(1 << 20, rank)

    errors = on_ranks(2, without_file)
    assert [type(error) for error in errors] == [RuntimeError] * 2
    assert all("hisparse-not-there" in str(error) for error in errors)
    assert files() == before


# --- the pool -------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 8, 16, 150])
def test_every_layer_is_one_ranks_and_ranks_have_even_parts(count: int) -> None:
    """At GLM-5.3's sizes: 79 latents, 22 indexers."""
    sizes = [41_984] * 79 + [8_448] * 22
    ranks = [SimpleNamespace(index=index, count=count) for index in range(count)]
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
            PLAN.device, PLAN.num_pages, Registrar(), {rank.index}, sharers=rank
        )

    pools = on_ranks(2, make)
    total = PLAN.num_pages * PLAN.device.host_page_bytes
    assert [what for what, _ in log] == ["touched", "touched", "pinned", "pinned"]
    assert [size for what, size in log if what == "pinned"] == [total, total]
    touched = [size for what, size in log if what == "touched"]
    assert sum(touched) == total and min(touched) > total / 4
    for pool in pools:
        pool.close()


def test_ranks_write_back_a_part_each_and_restore_all() -> None:
    """Frames are filled alike, as the ranks compute the same latents."""
    num_stacks = PLAN.device.num_stacks
    copy = PageCopy(5, 3, 9, tuple(range(2, 2 + num_stacks)))
    worlds = [RuntimeWorld(seed=1) for _ in range(2)]
    pools = on_ranks(
        2, lambda rank: HostPool(PLAN.device, PLAN.num_pages, sharers=rank)
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
    many = len(PLAN.device.host_layers) * 4
    sharers = SimpleNamespace(index=many // 2, count=many, exchange=None)
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
    monkeypatch.setattr(distributed, "get_world_size", lambda group: len(nodes))
    monkeypatch.setattr(distributed, "all_gather_object", gather)
    for rank, node in enumerate(nodes):
        group = SimpleNamespace(
            cpu_group="cpu", world_size=len(nodes), rank_in_group=rank
        )
        sharers = glue_worker.RanksOfNode(group)  # type: ignore[arg-type]
        own = [other for other, place in enumerate(nodes) if place == node]
        assert (sharers.index, sharers.count) == (own.index(rank), len(own))
        assert sharers.exchange("word") == [f"word of {other}" for other in own]
