# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""One rank's side: host pool, copies, and the resolvers of its layers."""

import torch

from vllm.config import VllmConfig
from vllm.logger import init_logger

from ..capacity import PoolPlan
from ..kernels.tensors import COUNTER_HITS, COUNTER_MISSES, COUNTER_OVERFLOW
from ..messages import StepUpdate
from ..runtime.copies import PageCopier
from ..runtime.host_pool import HostPool
from ..runtime.resolver import LayerResolver, UnitResolver
from .block_tables import HiSparseBlockTables
from .metrics import COUNTERS

logger = init_logger(__name__)


class HiSparseWorker:
    """Applies residency and moves pages on one rank.

    Args:
        vllm_config: Configuration.
        plan: The pools.
        kv_caches: Views of the device pool by layer name.
        rank: This rank; acknowledgements carry it.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        plan: PoolPlan,
        kv_caches: dict[str, torch.Tensor],
        rank: int,
    ) -> None:
        self._config, self.plan, self.rank = vllm_config, plan, rank
        self.slab = _slab(plan, kv_caches)
        self.host = HostPool(plan.device, plan.num_pages, pin=self.slab.is_cuda)
        self.copier = PageCopier(plan.device, self.slab, self.host)
        self._block_tables: HiSparseBlockTables | None = None
        self._acks: dict[int, set[int]] = {}
        self.units: list[UnitResolver] = []

    def bind(self, block_tables: HiSparseBlockTables) -> None:
        """Give the layers their resolvers, once the runner's tables are known."""
        if self._block_tables is block_tables:
            return
        self._block_tables = block_tables
        device, tables = self.plan.device, block_tables.tables
        max_query_rows = 1 + self.plan.hot.drafts
        self.units = [
            UnitResolver(tables, index, max_query_rows)
            for index in range(len(device.units))
        ]
        layers = self._config.compilation_config.static_forward_context
        for index, place in enumerate(device.latents):
            unit = self.units[place.unit]
            resolver = LayerResolver(
                unit,
                place,
                tables,
                self.host.rows(place.name, device.row_bytes),
                self.slab,
                is_leader=unit.unit.latents[0] == index,
            )
            layers[place.name].hisparse = HiSparseLayer(resolver, block_tables)

    def prepare_step(
        self,
        update: StepUpdate,
        state_rows: dict[str, int],
        block_tables: HiSparseBlockTables,
    ) -> None:
        """Apply an update before anything of the step is launched (R4)."""
        self.bind(block_tables)
        block_tables.tables.apply(update, state_rows)
        self.copier.restore(update.restores)
        self.copier.write_back(update.write_backs)

    def take_acks(self) -> dict[int, set[int]]:
        """Transfers that completed since the last call."""
        return {transfer_id: {self.rank} for transfer_id in self.copier.poll()}

    def take_counters(self) -> dict[str, int]:
        """Increments of `metrics.COUNTERS` since the last call."""
        totals = dict.fromkeys(COUNTERS, 0)
        for unit in self.units:
            counters = unit.take_counters()
            totals["cache_hits"] += counters[COUNTER_HITS]
            totals["cache_misses"] += counters[COUNTER_MISSES]
            totals["overflow_rows"] += counters[COUNTER_OVERFLOW]
            rows = counters[COUNTER_MISSES] * len(unit.unit.latents)
            totals["host_to_device_bytes"] += rows * self.plan.device.row_bytes
        restored, written = self.copier.take_bytes()
        totals["host_to_device_bytes"] += restored
        totals["device_to_host_bytes"] = written
        return totals

    def shutdown(self) -> None:
        """Release the host pool."""


class HiSparseLayer:
    """A latent layer's way to its rows; hangs on the attention layer."""

    def __init__(
        self, resolver: LayerResolver, block_tables: HiSparseBlockTables
    ) -> None:
        self._resolver, self._block_tables = resolver, block_tables

    def groups(self, topk: torch.Tensor, stride: int):
        """Token indices and physical rows, group by group."""
        return self._resolver.groups(self._block_tables.batch, topk, stride)


def _slab(plan: PoolPlan, kv_caches: dict[str, torch.Tensor]) -> torch.Tensor:
    """The whole device pool as blocks, from any layer's view of it."""
    device = plan.device
    cache = kv_caches[device.latents[0].name]
    storage = torch.empty(0, dtype=torch.uint8, device=cache.device)
    storage.set_(cache.untyped_storage())
    size = plan.num_blocks * device.block_bytes
    return storage[:size].view(plan.num_blocks, device.block_bytes)
