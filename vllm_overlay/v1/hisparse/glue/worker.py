# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""One rank's side: host pool, copies, and the resolvers of its layers."""

from collections.abc import Sequence
from typing import Any

import torch

from vllm import _custom_ops as ops
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import GroupCoordinator, in_the_same_node_as
from vllm.logger import init_logger

from ..capacity import PoolPlan
from ..kernels.tensors import (
    COUNTER_HITS,
    COUNTER_MISSES,
    COUNTER_OVERFLOW,
    COUNTER_SHARED,
)
from ..messages import StepUpdate
from ..runtime.ahead import Ahead, InOrder, SideStream
from ..runtime.buffers import CounterReader, ResolverBuffers
from ..runtime.copies import CopyQueue, PageCopier
from ..runtime.cpu_copies import CpuCopies
from ..runtime.host_pool import CudaRegistrar, HostPool, cpus_near
from ..runtime.parts import LayerMemory
from ..runtime.resolver import Attention, LayerResolver, UnitResolver, check_faults
from ..runtime.shared_memory import Sharers
from ..runtime.stream_copies import StreamCopies
from ..settings import GIB
from .backends import check_backends, with_block_table
from .block_tables import HiSparseBlockTables
from .metrics import WORKER_COUNTERS

logger = init_logger(__name__)


class HiSparseWorker:
    """Applies residency and moves pages on one rank.

    Args:
        vllm_config: Configuration.
        plan: The pools.
        kv_caches: Views of the device pool by layer name.
        group: Ranks with the same latents; acknowledgements carry this one's number.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        plan: PoolPlan,
        kv_caches: dict[str, torch.Tensor],
        group: GroupCoordinator,
    ) -> None:
        self._config, self.plan, self.rank = vllm_config, plan, group.rank_in_group
        self.slab = _slab(plan, kv_caches)
        layers = vllm_config.compilation_config.static_forward_context
        check_backends(layers[place.name] for place in plan.device.latents)
        self.host = _host_pool(plan, self.slab.device, Ranks(group))
        to_host, to_device = (_copy_queue(self.slab.device) for _ in range(2))
        self.copier = PageCopier(plan.device, self.slab, self.host, to_host, to_device)
        self.units: list[UnitResolver] = []
        self._has_begun = False

    def bind(self, block_tables: HiSparseBlockTables) -> None:
        """Give the layers their resolvers."""
        self._block_tables = block_tables
        drafts = self._config.speculative_config
        block_tables.drafts_repeat_step = bool(drafts and drafts.use_multi_module_mtp())
        device, tables = self.plan.device, block_tables.tables
        num_pages = tables.residency.page_frame.shape[1]
        self.buffers = ResolverBuffers(self.plan, num_pages, self.slab.device)
        stream = None if self.slab.device.type == "cpu" else torch.cuda.Stream()
        self.units = [
            UnitResolver(
                tables, self.buffers, index, _ahead(stream, len(unit.latents) - 1)
            )
            for index, unit in enumerate(device.units)
        ]
        self._counters = CounterReader(self.buffers)
        layers = self._config.compilation_config.static_forward_context
        for place in device.latents:
            unit = self.units[place.unit]
            memory = LayerMemory(place, tables, self.host.layers[place.name], self.slab)
            resolver = LayerResolver(unit, memory)
            layers[place.name].hisparse = HiSparseLayer(
                resolver, block_tables, place.stack
            )
            if stream is not None and resolver.is_leader:
                unit.warm_up(block_tables.batch, memory)
        if stream is not None:
            tables.warm_up()

    def prepare_step(
        self, update: StepUpdate, state_rows: dict[str, int], counts: dict[int, int]
    ) -> None:
        """Apply an update before anything of the step is launched (R4).

        Args:
            update: From the scheduler.
            state_rows: State row of each request on this worker.
            counts: Tokens of the step by state row, in the order of the batch.
        """
        if not self._has_begun:
            # vLLM's warm-up runs steps whose requests have no frames.
            self._has_begun = True
            self.buffers.forget_counts()
        tables = self._block_tables.tables
        tables.apply(update, state_rows)
        self._block_tables.next_shape = tables.begin_step(counts)
        self.copier.restore(update.restores)
        self.copier.write_back(update.write_backs)

    def take_acks(self) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
        """Ranks of copies that completed, and that failed, since the last call."""
        done, failed = (
            {transfer_id: {self.rank} for transfer_id in ended}
            for ended in self.copier.poll()
        )
        return done, failed

    def take_counters(self) -> dict[str, int]:
        """Increments of `metrics.WORKER_COUNTERS` since the last call.

        vLLM adds up what the ranks report. All of them select the same rows, so one
        of them counts those; each counts its own bytes.
        """
        totals = dict.fromkeys(WORKER_COUNTERS, 0)
        by_unit, faults = self._counters.take()
        check_faults(faults)
        is_first = self.rank == 0
        for unit, counters in zip(self.units, by_unit, strict=True):
            totals["cache_hits"] += counters[COUNTER_HITS] * is_first
            totals["cache_misses"] += counters[COUNTER_MISSES] * is_first
            totals["shared_misses"] += counters[COUNTER_SHARED] * is_first
            totals["overflow_rows"] += counters[COUNTER_OVERFLOW] * is_first
            rows = counters[COUNTER_MISSES] * len(unit.unit.latents)
            totals["host_to_device_bytes"] += rows * self.plan.device.row_bytes
        restored, written = self.copier.take_bytes()
        totals["host_to_device_bytes"] += restored
        totals["device_to_host_bytes"] = written
        return totals

    def shutdown(self) -> None:
        """Wait for copies and steps under way, and release the host pool."""
        self.copier.shutdown()
        if self.slab.is_cuda:
            torch.cuda.synchronize(self.slab.device)
        self.host.close()


class HiSparseLayer:
    """A latent layer's way to its rows; hangs on the attention layer."""

    def __init__(
        self, resolver: LayerResolver, block_tables: HiSparseBlockTables, stack: int
    ) -> None:
        self._resolver, self._block_tables = resolver, block_tables
        self._stack = stack

    def attend(
        self, topk: torch.Tensor, stride: int, attention: Attention
    ) -> torch.Tensor:
        """Attend to selected rows, see `LayerResolver.attend`."""
        return self._resolver.attend(self._block_tables.batch, topk, stride, attention)

    @property
    def must_resolve(self) -> bool:
        """Whether a prefill of the step has host-only pages.

        Paths that gather a request's context by block table would miss them.
        """
        return bool(self._block_tables.batch.shape.tail)

    def with_own_blocks(self, metadata: Any) -> Any:
        """The step's metadata with the block table of this layer's stack."""
        return with_block_table(metadata, self._block_tables.of_stack(self._stack))


def _slab(plan: PoolPlan, kv_caches: dict[str, torch.Tensor]) -> torch.Tensor:
    """The whole device pool as blocks, from any layer's view of it."""
    device = plan.device
    cache = kv_caches[device.latents[0].name]
    storage = torch.empty(0, dtype=torch.uint8, device=cache.device)
    storage.set_(cache.untyped_storage())
    size = plan.num_blocks * device.block_bytes
    return storage[:size].view(plan.num_blocks, device.block_bytes)


class Ranks:
    """The ranks of a group, see `Sharers`."""

    def __init__(self, group: GroupCoordinator) -> None:
        self._group, self.rank = group.cpu_group, group.rank_in_group
        self._size = group.world_size
        left = list(range(self._size))
        self.node: Sequence[int] = left
        while self._size > 1 and left:
            is_there = in_the_same_node_as(self._group, left[0])
            together = [rank for rank in left if is_there[rank]]
            if self.rank in together:
                self.node = together
            left = [rank for rank in left if not is_there[rank]]

    def exchange(self, value: Any) -> list[Any]:
        """See `Sharers`."""
        values = [value] * self._size
        if self._size > 1:
            torch.distributed.all_gather_object(values, value, group=self._group)
        return values


def _host_pool(plan: PoolPlan, device: torch.device, sharers: Sharers) -> HostPool:
    """The host pool, pinned and near the devices where these are GPUs."""
    if device.type == "cpu":
        return HostPool(plan.device, plan.num_pages, sharers=sharers)
    properties = torch.cuda.get_device_properties(device)
    address = (
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
        f"{properties.pci_device_id:02x}.0"
    )
    return HostPool(
        plan.device,
        plan.num_pages,
        CudaRegistrar(),
        cpus_near(address),
        _TouchProgress(),
        sharers,
    )


class _TouchProgress:
    """Says now and then how far a rank's part of the host pool is: it takes a while."""

    STEPS = 10

    def __init__(self) -> None:
        self._said = 0

    def __call__(self, done: int, total: int) -> None:
        if done * self.STEPS // total > self._said or done == total:
            self._said = done * self.STEPS // total
            logger.info(
                "HiSparse: %.1f of %.1f GiB of the host pool are in place",
                done / GIB,
                total / GIB,
            )


def _ahead(stream: torch.cuda.Stream | None, most: int) -> Ahead:
    return InOrder() if stream is None else SideStream(stream, most, _is_in_a_break)


def _is_in_a_break() -> bool:
    """Whether this runs eagerly between two segments of a graph that is captured."""
    is_capturing = torch.cuda.is_current_stream_capturing()
    return BreakableCUDAGraphCapture.is_active() and not is_capturing


def _copy_queue(device: torch.device) -> CopyQueue:
    if device.type == "cpu":
        return CpuCopies()
    return StreamCopies(device, ops.swap_blocks_batch)
