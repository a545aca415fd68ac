# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Counters and gauges on their way to the metrics endpoint and into the log."""

from collections import defaultdict
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs the patched vLLM")

import prometheus_client  # noqa: E402
from vllm.v1.hisparse.glue.connector import HiSparseConnector  # noqa: E402
from vllm.v1.hisparse.glue.manager import HiSparseManager  # noqa: E402
from vllm.v1.hisparse.glue.metrics import (  # noqa: E402
    GAUGES,
    SCHEDULER_COUNTERS,
    WORKER_COUNTERS,
    HiSparseStats,
)
from vllm.v1.hisparse.residency import Residency, ResidencyConfig  # noqa: E402


class Shown:
    """Metrics that remember their values by name."""

    def __init__(self) -> None:
        self.values: dict[str, float] = defaultdict(float)
        self.kinds: dict[str, str] = {}

    def types(self) -> dict:
        return {
            prometheus_client.Counter: self._kind("counter"),
            prometheus_client.Gauge: self._kind("gauge"),
            prometheus_client.Histogram: self._kind("histogram"),
        }

    def _kind(self, kind: str):
        def make(name: str, documentation: str, labelnames: list):
            assert documentation
            self.kinds[name] = kind
            metric = SimpleNamespace()
            if kind == "counter":
                metric.inc = lambda v: self._set(name, self.values[name] + v)
            else:
                metric.set = lambda v: self._set(name, v)
            return SimpleNamespace(labels=lambda *labels: metric)

        return make

    def _set(self, name: str, value: float) -> None:
        self.values[name] = value


def manager() -> HiSparseManager:
    """A manager with a core of its own, and nothing else."""
    made = object.__new__(HiSparseManager)
    config = ResidencyConfig(num_blocks=20, num_stacks=2, lease_blocks=4, num_rows=2)
    made.residency = Residency(config)
    made._counted_hits, made._known = (0, 0), set()
    made.block_pool = SimpleNamespace(
        get_usage=lambda: 0.5, cached_block_hash_to_block=range(7)
    )
    return made


def scheduler_stats(manager: HiSparseManager) -> HiSparseStats:
    connector = object.__new__(HiSparseConnector)
    connector._worker, connector._manager = None, manager
    stats = connector.get_kv_connector_stats()
    assert stats is not None
    return stats


def worker_stats(value: int) -> HiSparseStats:
    return HiSparseStats(dict.fromkeys(WORKER_COUNTERS, value))


def test_everything_that_is_counted_is_shown_under_its_kind() -> None:
    shown = Shown()
    metrics = HiSparseConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None), shown.types(), ["engine"], {0: ["0"]}
    )
    scheduler = manager()
    scheduler.residency.num_device_hits, scheduler.residency.num_host_hits = 3, 4
    stats = worker_stats(2).aggregate(scheduler_stats(scheduler))
    assert set(stats.data) == {*WORKER_COUNTERS, *SCHEDULER_COUNTERS, *GAUGES}
    metrics.observe(stats.data)
    scheduler.residency.num_host_hits = 9
    metrics.observe(worker_stats(1).aggregate(scheduler_stats(scheduler)).data)
    for name in (*WORKER_COUNTERS, *SCHEDULER_COUNTERS):
        assert shown.kinds[f"vllm:hisparse_{name}"] == "counter"
    for name in GAUGES:
        assert shown.kinds[f"vllm:hisparse_{name}"] == "gauge"
    assert shown.values["vllm:hisparse_prefix_pages_device"] == 3
    assert shown.values["vllm:hisparse_prefix_pages_host"] == 9
    assert shown.values["vllm:hisparse_cache_hits"] == 3
    assert shown.values["vllm:hisparse_host_pool_usage"] == 0.5
    assert shown.values["vllm:hisparse_host_pages_cached"] == 7


def test_the_log_line_has_the_hits_of_its_interval() -> None:
    scheduler = manager()
    scheduler.residency.num_host_hits = 4
    logged = scheduler_stats(scheduler)
    scheduler.residency.num_host_hits = 9
    logged = logged.aggregate(scheduler_stats(scheduler))
    line = logged.reduce()
    assert line["hisparse_prefix_pages_host"] == 9
    assert line["hisparse_prefix_pages_device"] == 0
