# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""HiSparse as a KV connector: the channel between scheduler and workers (D16, D17).

Connectors already carry metadata down with each step and acknowledgements up, and
aggregate these over ranks. Hits on host pages are vLLM's own prefix-cache hits, so
the connector reports no external tokens and siblings are not blocked.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tp_group

from ..messages import StepUpdate
from .block_tables import HiSparseBlockTables
from .manager import HiSparseManager, register
from .metrics import HiSparsePromMetrics, HiSparseStats
from .spec import HiSparseKVCacheConfig
from .worker import HiSparseWorker

if TYPE_CHECKING:
    import torch

    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.states import RequestState


@dataclass
class HiSparseMetadata(KVConnectorMetadata):
    """What changed since the last step."""

    update: StepUpdate


@dataclass
class HiSparseAcks(KVConnectorWorkerMetadata):
    """What became of transfers.

    Attributes:
        done: Ranks that completed each (D19).
        failed: Ranks that could not complete it.
    """

    done: dict[int, set[int]] = field(default_factory=dict)
    failed: dict[int, set[int]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "HiSparseAcks":
        """Unite with another rank's acknowledgements."""
        assert isinstance(other, HiSparseAcks)
        for own, theirs in ((self.done, other.done), (self.failed, other.failed)):
            for transfer_id, ranks in theirs.items():
                own.setdefault(transfer_id, set()).update(ranks)
        return self


class HiSparseConnector(KVConnectorBase_V1, SupportsHMA):
    """Carries residency between the scheduler's manager and the workers."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._manager: HiSparseManager | None = None
        self._worker: HiSparseWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            # Before the scheduler makes its managers.
            register()

    # The default is "is a producer"; a preempted request would then have its
    # in-flight tokens dropped instead of delivered.
    requires_kv_delivery = False

    # --- scheduler --------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Find the manager whose pages this connector moves."""
        coordinator = kv_cache_manager.coordinator
        (manager,) = coordinator.single_type_managers
        assert isinstance(manager, HiSparseManager)
        manager.num_reprefillable_tokens = coordinator.num_reprefillable_tokens
        self._manager = kv_cache_manager.hisparse = manager

    @property
    def manager(self) -> "HiSparseManager":
        """The block manager of the DSA group."""
        assert self._manager is not None
        return self._manager

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        pass

    def build_connector_meta(
        self, scheduler_output: "SchedulerOutput"
    ) -> KVConnectorMetadata:
        residency = self.manager.residency
        # New to the workers, or a session that goes on after it waited for input.
        for new in scheduler_output.scheduled_new_reqs:
            residency.resend(new.req_id)
        self.manager.step_is_scheduled()
        return HiSparseMetadata(residency.take_update())

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        acks = connector_output.kv_connector_worker_meta
        if isinstance(acks, HiSparseAcks):
            self.manager.acknowledge(acks.done, acks.failed)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def get_kv_connector_stats(self) -> HiSparseStats | None:
        """Counters on a worker; gauges and counters of its own on the scheduler."""
        if self._worker is not None:
            return HiSparseStats(self._worker.take_counters())
        if self._manager is not None:
            return HiSparseStats(
                {**self._manager.gauges(), **self._manager.take_counters()}
            )
        return None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> HiSparseStats | None:
        return HiSparseStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config, metric_types, labelnames, per_engine_labelvalues
    ) -> HiSparsePromMetrics:
        return HiSparsePromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping while copies are under way (D17)."""
        return self.manager.residency.may_gain_room()

    # --- worker -----------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        assert isinstance(self._kv_cache_config, HiSparseKVCacheConfig)
        assert self._kv_cache_config.plan is not None
        if self._worker is not None:
            # vLLM hands the same connector to the second engine of a process.
            raise RuntimeError(
                "HiSparse: a second engine in one process; allowed: one. Remedy: shut "
                "the first one down, or run them in processes of their own"
            )
        self._worker = HiSparseWorker(
            self._vllm_config,
            self._kv_cache_config.plan,
            kv_caches,
            get_tp_group(),
        )

    @property
    def worker(self) -> "HiSparseWorker":
        """This rank's side; there once the caches are registered."""
        assert self._worker is not None
        return self._worker

    def bind_block_tables(self, block_tables: "BlockTables") -> None:
        """Connect residency and layers, before anything runs or is captured."""
        assert isinstance(block_tables, HiSparseBlockTables)
        self.worker.bind(block_tables)

    def prepare_step(
        self, scheduler_output: "SchedulerOutput", req_states: "RequestState"
    ) -> None:
        """Apply what changed, before anything of the step is computed (D16)."""
        # The scheduler's process has no use for the runner.
        from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

        metadata = scheduler_output.kv_connector_metadata
        assert isinstance(metadata, HiSparseMetadata)
        decode_query_len = 1 + self._vllm_config.num_speculative_tokens
        counts = scheduler_output.num_scheduled_tokens
        order = sort_batch_req_ids(
            counts, scheduler_output.scheduled_spec_decode_tokens, decode_query_len
        )
        rows = req_states.req_id_to_index
        self.worker.prepare_step(
            metadata.update, rows, {rows[name]: counts[name] for name in order}
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        done, failed = self.worker.take_acks()
        return HiSparseAcks(done, failed) if done or failed else None

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
