# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Counters and gauges of HiSparse, through vLLM's connector metrics (D32)."""

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

# A step's increments, counted by the workers.
WORKER_COUNTERS = {
    # Of the union of a request's query rows; both together are its size.
    "cache_hits": "Distinct selected rows found in a hot buffer.",
    "cache_misses": "Distinct selected rows fetched from the host pool.",
    "shared_misses": "Misses that another query row of the request had as well.",
    "overflow_rows": "Fetched rows that found no place in the hot buffer.",
    "host_to_device_bytes": "Bytes of fetched rows and restored pages, all ranks; "
    "without what prefills stage.",
    "device_to_host_bytes": "Bytes of pages written back to host pools, all ranks.",
}
# And by the scheduler.
SCHEDULER_COUNTERS = {
    "prefix_pages_device": "Pages of prefix hits whose latents were on the device.",
    "prefix_pages_host": "Pages of prefix hits whose latents were on the host only.",
}
COUNTERS = {**WORKER_COUNTERS, **SCHEDULER_COUNTERS}
# Known to the scheduler; the latest value counts.
GAUGES = {
    "host_pool_usage": "Share of the host pool that requests and copies hold, 0 to 1.",
    "host_pages_cached": "Pages of the host pool that prefix hits can find.",
    "pending_transfers": "Page copies that are queued or under way.",
    "failed_transfers": "Write-backs that failed since the start.",
    "lost_pages": "Pages whose restore failed or took too long; they are recomputed.",
    "stalled": "1 while copies that took too long are not waited for, else 0.",
    "requests_full": "Running requests with all pages on the device.",
    "requests_mixed": "Running requests that hold a hot lease.",
    "pages_device": "Running requests' pages with no complete copy on the host.",
    "pages_both": "Running requests' pages on the device and on the host.",
    "pages_host": "Running requests' pages with latents on the host only.",
}


@dataclass
class HiSparseStats(KVConnectorStats):
    """Increments of COUNTERS and values of GAUGES, by name."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            if name in COUNTERS:
                value += self.data.get(name, 0)
            self.data[name] = value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"hisparse_{name}": value for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class HiSparsePromMetrics(KVConnectorPromMetrics):
    """``vllm:hisparse_*`` on the metrics endpoint."""

    def __init__(self, vllm_config, metric_types, labelnames, per_engine) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._metrics = {}
        for kind, texts in ((Counter, COUNTERS), (Gauge, GAUGES)):
            for name, text in texts.items():
                metric = metric_types[kind](
                    name=f"vllm:hisparse_{name}",
                    documentation=text,
                    labelnames=labelnames,
                )
                for engine, labels in per_engine.items():
                    self._metrics[engine, name] = metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            metric = self._metrics[engine_idx, name]
            if name in COUNTERS:
                metric.inc(value)
            else:
                metric.set(value)
