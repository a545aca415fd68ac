# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Tables, counters, host pool and copies of one rank."""

import dataclasses
import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs the patched vLLM")

from vllm.v1.hisparse import capacity  # noqa: E402
from vllm.v1.hisparse.kernels.tensors import NUM_COUNTERS  # noqa: E402
from vllm.v1.hisparse.messages import (  # noqa: E402
    PageCopy,
    RequestUpdate,
    StepUpdate,
)
from vllm.v1.hisparse.runtime import ahead, host_pool  # noqa: E402
from vllm.v1.hisparse.runtime.buffers import (  # noqa: E402
    CounterReader,
    ResolverBuffers,
)
from vllm.v1.hisparse.runtime.copies import CopyQueue, PageCopier  # noqa: E402
from vllm.v1.hisparse.runtime.cpu_copies import CpuCopies  # noqa: E402
from vllm.v1.hisparse.runtime.host_pool import HostPool, cpus_near  # noqa: E402
from vllm.v1.hisparse.runtime.stream_copies import StreamCopies  # noqa: E402
from vllm.v1.hisparse.runtime.words import WordTables  # noqa: E402

from fake_cuda import FakeCuda  # noqa: E402
from runtime_world import POISON, RuntimeWorld, small_plan  # noqa: E402

# --- tables ---------------------------------------------------------------------


def test_words_of_all_tables_are_written_at_once() -> None:
    words = WordTables({"a": (2, 3), "empty": (4, 0), "b": (5,)}, "cpu")
    words.put("a", 1, [7, 8, 9])
    words.put("empty", 0, [])
    words.put_at("b", iter([4, 0]), [5, 6])
    assert not any(table.any() for table in words.tables.values())
    words.flush()
    words.flush()
    assert words.tables["a"].tolist() == [[0, 7, 8], [9, 0, 0]]
    assert words.tables["b"].tolist() == [6, 0, 0, 0, 5]


def test_the_host_knows_how_many_pages_are_host_only() -> None:
    world = RuntimeWorld()
    world.add("a", [True, False, True, False], leased=True)
    row, tables = world.state_rows["a"], world.tables

    def count() -> int:
        entries = tables.residency.page_frame[row]
        return int((entries[: tables.page_count[row]] < 0).sum())

    assert tables.host_pages[row] == count() == 2
    change = RequestUpdate(4, [30, -2 - 31], changed={0: -3, 1: 32, 2: -4})
    tables.apply(StepUpdate(requests={"a": change}), world.state_rows)
    assert tables.host_pages[row] == count() == 4
    again = RequestUpdate(0, [33])
    tables.apply(StepUpdate(requests={"a": again}), world.state_rows)
    assert tables.host_pages[row] == count() == 0
    assert tables.residency.page_frame[row].tolist()[:7] == [33] + [-1] * 6
    assert tables.lease_row[row] == tables.residency.mixed_row[row] == -1


@pytest.mark.parametrize("counts", [{"a": 3}, {"b": 1, "a": 16}])
def test_kernels_and_torch_give_the_same_slots_and_tables(counts) -> None:
    world = RuntimeWorld()
    world.add("a", [True, False, True, False], leased=True)
    world.add("b", [True] * 5, leased=False)
    positions = torch.arange(32, 64).repeat(8)
    found = []
    for use_kernels in (False, True):
        world.tables.use_kernels = use_kernels
        world.start(counts)
        # A padded request, and tokens behind the batch.
        world.batch.num_requests += 1
        slots = torch.full((world.plan.device.frame_blocks, 40), 99)
        world.batch.token_request.fill_(99)
        world.tables.slots(world.batch, positions, slots)
        table = torch.full((3, 9), 99, dtype=torch.int32)
        world.tables.indexer_table(world.batch, table)
        owners = world.batch.token_request[:40].clone()
        # Behind a request's pages the kernel leaves what nobody reads.
        pages = world.tables.page_count[world.batch.state_row[: len(counts)].long()]
        for row, count in zip(table, pages.tolist()):
            row[count:] = 0
        found.append((slots, owners, table[: len(counts) + 1]))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
    assert (found[0][0] >= 0).any() and (found[0][2] > 0).any()


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_plan_counts_the_memory_of_the_resolver(drafts: int) -> None:
    plan = small_plan(drafts=drafts)
    num_pages = plan.pages(plan.limits.max_model_len) + 1
    buffers = ResolverBuffers(plan, num_pages, "cpu")
    tensors = [
        value
        for value in (*vars(buffers).values(), *vars(buffers.plan).values())
        if isinstance(value, torch.Tensor)
    ]
    faults = buffers.faults.nbytes
    assert sum(t.nbytes for t in tensors) - faults == plan.resolver_bytes
    assert capacity.NUM_COUNTERS == NUM_COUNTERS


def test_counters_are_taken_once() -> None:
    plan = small_plan()
    buffers = ResolverBuffers(plan, 4, "cpu")
    reader = CounterReader(buffers)
    buffers.counters[1, :2, 0] = 5
    buffers.faults[2] = 1
    assert reader.take() == ([[0] * 5, [10, 0, 0, 0, 0]], [0, 0, 1])
    buffers.counters[1, 0, 0] += 1
    assert reader.take()[0] == [[0] * 5, [1, 0, 0, 0, 0]]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_count_selected_rows_once_and_bytes_each(rank: int) -> None:
    from vllm.v1.hisparse.glue.worker import HiSparseWorker

    world, copier = copier_of(CpuCopies)
    worker = object.__new__(HiSparseWorker)
    worker.plan, worker.rank, worker.units = world.plan, rank, world.units
    worker.copier, worker._counters = copier, CounterReader(world.buffers)
    world.buffers.counters[0, 0] = torch.tensor([5, 3, 2, 4, 1])
    counted = worker.take_counters()
    names = ("cache_hits", "cache_misses", "overflow_rows", "shared_misses")
    want = [5, 3, 2, 4] if rank == 0 else [0] * 4
    assert [counted[name] for name in names] == want
    unit = world.plan.device.units[0]
    row_bytes = world.plan.device.row_bytes
    assert counted["host_to_device_bytes"] == 3 * len(unit.latents) * row_bytes


# --- host pool --------------------------------------------------------------------


class Registrar:
    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.calls: list[tuple] = []

    def pin(self, address: int, num_bytes: int) -> int:
        self.calls.append(("pin", address, num_bytes))
        return self.error

    def unpin(self, address: int) -> int:
        self.calls.append(("unpin", address))
        return 0


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_pinned_pool_is_touched_first_and_unpinned_once(monkeypatch) -> None:
    monkeypatch.setattr(host_pool, "TOUCH_CHUNK_BYTES", 5 << 20)
    plan = small_plan().device
    num_pages = (64 << 20) // plan.host_page_bytes
    registrar, progress = Registrar(), []
    before = resident_bytes()
    pool = HostPool(plan, num_pages, registrar, {0}, lambda *p: progress.append(p))
    size = num_pages * plan.host_page_bytes
    assert resident_bytes() - before > size - (4 << 20)
    address = pool.buffer.data_ptr()
    assert registrar.calls == [("pin", address, size)]
    assert len(progress) == -(-size // (5 << 20)) and progress[-1] == (size, size)
    assert all(not layer.any() for layer in pool.layers.values())
    pool.close()
    pool.close()
    assert registrar.calls[1:] == [("unpin", address)]


def test_a_pool_of_the_cpu_takes_no_memory_before_it_is_used() -> None:
    plan = small_plan().device
    before = resident_bytes()
    pool = HostPool(plan, (256 << 20) // plan.host_page_bytes)
    assert resident_bytes() - before < 16 << 20
    pool.close()


def test_memory_that_cannot_be_pinned_is_an_error_with_a_remedy() -> None:
    plan = small_plan().device
    with pytest.raises(RuntimeError, match="host_pool_gib.*error 2.*ulimit -l"):
        HostPool(plan, 60, Registrar(error=2))


def test_the_pool_is_touched_from_processors_near_the_device() -> None:
    seen = []
    buffer = torch.ones(1 << 20, dtype=torch.uint8)
    cpu = max(os.sched_getaffinity(0))

    def progress(done: int, total: int) -> None:
        seen.append((done, total))

    before = os.sched_getaffinity(0)
    chosen = []
    original = os.sched_setaffinity
    os.sched_setaffinity = lambda pid, cpus: chosen.append((pid, set(cpus)))
    try:
        host_pool.touch(buffer, {cpu, 10**6}, progress)
        host_pool.touch(buffer, {10**6}, progress)
    finally:
        os.sched_setaffinity = original
    assert chosen == [(0, {cpu}), (0, before)]
    assert seen == [(1 << 20, 1 << 20)] * 2 and not buffer.any()
    assert os.sched_getaffinity(0) == before


def test_processors_near_a_device_are_read_from_sysfs(tmp_path) -> None:
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    node = tmp_path / "devices/system/node/node1"
    device.mkdir(parents=True)
    node.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    (node / "cpulist").write_text("2-4,9\n")
    assert cpus_near("0000:3b:00.0", str(tmp_path)) == {2, 3, 4, 9}
    assert cpus_near("0000:00:00.0", str(tmp_path)) == set()
    (device / "numa_node").write_text("-1\n")
    assert cpus_near("0000:3b:00.0", str(tmp_path)) == set()


# --- copies -------------------------------------------------------------------------


def copier_of(queue: Callable[[], CopyQueue]) -> tuple[RuntimeWorld, PageCopier]:
    world = RuntimeWorld()
    return world, PageCopier(
        world.plan.device, world.slab, world.host, queue(), queue()
    )


@pytest.mark.parametrize("parts", ["both", "indexer", "latents"])
def test_a_page_goes_to_the_host_and_back_layer_by_layer(parts: str) -> None:
    world, copier = copier_of(CpuCopies)
    device = world.plan.device
    blocks = tuple(range(2, 2 + device.num_stacks)) if parts != "indexer" else ()
    copy = PageCopy(5, 3, 9 if parts != "latents" else 0, blocks)
    before = world.host.buffer.clone(), world.slab.clone()
    copier.restore([copy])
    assert torch.equal(world.slab, before[1]) and copier.to_device.num_pending == 1
    assert copier.poll() == ([5], []) and copier.to_device.num_pending == 0
    assert torch.equal(world.host.buffer, before[0])
    touched = torch.zeros_like(world.slab, dtype=torch.bool)
    size = 0
    for place in (*device.indexers, *device.latents):
        page = world.host.layers[place.name][3]
        stack = getattr(place, "stack", None)
        if not (copy.indexer_block if stack is None else blocks):
            continue
        block = copy.indexer_block if stack is None else blocks[stack]
        own = slice(place.byte_offset, place.byte_offset + len(page))
        assert torch.equal(world.slab[block, own], page)
        touched[block, own] = True
        size += len(page)
    assert torch.equal(world.slab[~touched], before[1][~touched])
    assert touched.any() and (world.slab[~touched] == POISON).all()
    world.host.buffer.zero_()
    copier.write_back([copy])
    assert not world.host.buffer.any() and copier.to_host.num_pending == 1
    assert copier.poll() == ([5], []) and copier.to_host.num_pending == 0
    written = world.host.buffer != 0
    assert torch.equal(world.host.buffer[written], before[0][written])
    host_page = torch.zeros_like(written)
    offsets = device.host_layer_offsets(world.plan.num_pages)
    for layer, offset in zip(device.host_layers, offsets):
        start = offset + 3 * layer.page_bytes
        host_page[start : start + layer.page_bytes] = True
    assert not (written & ~host_page).any() and written.sum() > size * 0.9
    assert copier.take_bytes() == (size, size)
    assert copier.take_bytes() == (0, 0)


@pytest.mark.parametrize("reverse", [False, True])
def test_copies_of_different_parts_end_each_by_itself(reverse: bool) -> None:
    """Which bytes belong to which, whatever the order of their ids."""
    world, copier = copier_of(CpuCopies)
    blocks = tuple(range(2, 2 + world.plan.device.num_stacks))
    copies = [PageCopy(4, 3, 9, ()), PageCopy(7, 4, 0, blocks), PageCopy(8, 5, 10, ())]
    copies = copies[::-1] if reverse else copies
    queue = copier.to_device
    queue.fails = lambda transfer_id: transfer_id == 7
    copier.restore(copies)
    done = [copy.transfer_id for copy in copies if not copy.latent_blocks]
    assert copier.poll() == (done, [7])
    for copy in copies:
        for place in world.plan.device.indexers:
            page = world.host.layers[place.name][copy.page_id]
            own = slice(place.byte_offset, place.byte_offset + len(page))
            if copy.indexer_block:
                assert torch.equal(world.slab[copy.indexer_block, own], page)
    assert (world.slab[list(blocks)] == POISON).all()


def test_copies_of_a_stream_come_after_the_step_and_it_waits_for_none(
    monkeypatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    batches = []

    def copy_batch(sources, targets, sizes):
        cuda.log.append(("copies", len(sizes)))
        batches.append((sources, targets, sizes))

    world, copier = copier_of(lambda: StreamCopies("a device", copy_batch))
    layers = len(world.plan.device.host_layers)
    blocks = tuple(range(2, 2 + world.plan.device.num_stacks))
    pages = [PageCopy(7, 3, 9, blocks), PageCopy(8, 4, 10, blocks)]
    copier.write_back(pages)
    assert cuda.log == [
        ("side", "waits for", "compute"),
        ("side", "is entered"),
        ("copies", 2 * layers),
        ("side", "records", 0),
        ("side", "is left"),
    ]
    cuda.log.clear()
    copier.restore([dataclasses.replace(pages[0], transfer_id=9)])
    # Not behind the write-backs: one of them may never end.
    assert cuda.log == [
        ("other side", "waits for", "compute"),
        ("other side", "is entered"),
        ("copies", layers),
        ("other side", "records", 1),
        ("other side", "is left"),
    ]
    (written, restored) = batches
    assert all(array.dtype == torch.int64 for array in written)
    for there, back in zip(written[:2], restored[:2][::-1]):
        assert torch.equal(there[:layers], back)
    assert copier.to_host.num_pending == 2 and copier.poll() == ([], [])
    cuda.ready.add(1)
    assert copier.poll() == ([9], [])
    cuda.ready.add(0)
    assert copier.poll() == ([7, 8], []) and copier.to_host.num_pending == 0
    copier.shutdown()
    assert cuda.log[-2:] == [(n, "synchronizes") for n in ("side", "other side")]


def test_copies_that_a_stream_does_not_accept_fail_when_what_it_did_accept_is_over(
    monkeypatch,
) -> None:
    cuda = FakeCuda(monkeypatch)

    def copy_batch(sources, targets, sizes):
        raise RuntimeError("invalid argument")

    world, copier = copier_of(lambda: StreamCopies("a device", copy_batch))
    blocks = tuple(range(2, 2 + world.plan.device.num_stacks))
    copier.restore([PageCopy(7, 3, 9, blocks), PageCopy(8, 4, 10, blocks)])
    assert copier.poll() == ([], [])
    cuda.ready.add(0)
    assert copier.poll() == ([], [7, 8]) and copier.poll() == ([], [])


def test_work_ahead_forks_from_the_compute_stream_and_is_joined(monkeypatch) -> None:
    cuda = FakeCuda(monkeypatch)
    side = ahead.SideStream(torch.cuda.Stream(), most=2)
    pieces = [lambda: cuda.log.append("one"), lambda: cuda.log.append("two")]
    side.start(pieces)
    assert cuda.log == [
        ("compute", "records", 0),
        ("side", "waits for", 0),
        ("side", "is entered"),
        "one",
        ("side", "records", 1),
        "two",
        ("side", "records", 2),
        ("side", "is left"),
    ]
    cuda.log.clear()
    side.join(1)
    side.join(0)
    assert cuda.log == [("compute", "waits for", 2), ("compute", "waits for", 1)]


def test_no_work_is_ahead_of_a_capture_that_goes_on(monkeypatch) -> None:
    cuda = FakeCuda(monkeypatch)
    side = ahead.SideStream(torch.cuda.Stream(), most=2, must_end=lambda: True)
    side.start([lambda: cuda.log.append("one"), lambda: cuda.log.append("two")])
    assert cuda.log == ["one", "two"]


@pytest.mark.parametrize("is_capturing", [False, True])
@pytest.mark.parametrize("is_active", [False, True])
def test_eager_work_between_segments_of_a_capture_is_known(
    is_active: bool, is_capturing: bool, monkeypatch
) -> None:
    from vllm.v1.hisparse.glue import worker

    capture = worker.BreakableCUDAGraphCapture
    monkeypatch.setattr(capture, "is_active", lambda: is_active)
    cuda = worker.torch.cuda
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: is_capturing)
    assert worker._is_in_a_break() == (is_active and not is_capturing)


def test_a_pool_is_released_behind_copies_and_steps(monkeypatch) -> None:
    from vllm.v1.hisparse.glue.worker import HiSparseWorker

    log: list = []
    worker = object.__new__(HiSparseWorker)
    worker.slab = SimpleNamespace(is_cuda=True, device="a device")
    worker.copier = SimpleNamespace(shutdown=lambda: log.append("copies"))
    worker.host = SimpleNamespace(close=lambda: log.append("released"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(device))
    worker.shutdown()
    assert log == ["copies", "a device", "released"]


def test_followers_hot_rows_are_fetched_when_their_leader_has_its_own(
    monkeypatch,
) -> None:
    """And overflow rows just before their attention, as one set serves all layers."""
    from vllm.v1.hisparse.runtime import parts

    world = RuntimeWorld(drafts=3)
    world.add("cold", [False] * 11 + [True], leased=True)
    order: list = []
    fetch_rows = parts.fetch_rows

    def fetched(*args, part, **sizes) -> None:
        order.append((args[4].data_ptr(), part.name))
        fetch_rows(*args, part=part, **sizes)

    monkeypatch.setattr(parts, "fetch_rows", fetched)
    counts = {"cold": 4}
    world.start(counts)
    topk = world.draw(counts, 12)
    unit = world.units[0]
    joined: list[int] = []
    unit._ahead.join = joined.append  # type: ignore[method-assign]
    for layer in world.layers[: len(unit.unit.latents)]:
        order.append("attention")
        layer.attend(world.batch, topk, 1, lambda t, rows, v: rows)
    names = [entry if entry == "attention" else entry[1] for entry in order]
    behind = len(unit.unit.latents) - 1
    assert names == [
        "attention",
        "ALL",
        *["HOT"] * behind,
        *["attention", "OVERFLOW"] * behind,
    ]
    assert joined == list(range(behind))
    # Each follower's own bytes, in the order of the layers.
    memories = [order[2 + i][0] for i in range(behind)]
    assert memories == [order[3 + behind + 2 * i][0] for i in range(behind)]
    assert len(set(memories)) == behind
