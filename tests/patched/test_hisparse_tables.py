# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What a state row forgets when another request gets it (trap 2)."""

import pytest

pytest.importorskip("vllm", reason="needs the patched vLLM")

from vllm.v1.hisparse.capacity import HotSizes, Limits, plan_pools  # noqa: E402
from vllm.v1.hisparse.layout import (  # noqa: E402
    IndexerLayer,
    LatentLayer,
    plan_device,
)
from vllm.v1.hisparse.messages import HotLease, RequestUpdate, StepUpdate  # noqa: E402
from vllm.v1.hisparse.runtime.tables import ResidencyTables  # noqa: E402


def test_a_state_row_that_changes_hands_has_no_lease_and_no_pages() -> None:
    latents = [LatentLayer(f"{i}.attn", i, row_bytes=2_304) for i in range(7)]
    indexers = [IndexerLayer(f"{i}.indexer", i, token_bytes=132) for i in (0, 5)]
    device = plan_device(latents, indexers, block_size=16)
    sizes = HotSizes(topk=32, hot_rows=64, drafts=0)
    limits = Limits(max_model_len=512, max_num_seqs=8, window_tokens=64)
    plan = plan_pools(device, sizes, limits, 600, host_bytes=100 << 20)
    tables = ResidencyTables(plan, 8, "cpu")
    lease = HotLease(1, tuple(range(1, 1 + plan.lease_blocks)))
    first = RequestUpdate(start=0, entries=[-2 - 5, 6], lease=lease)
    tables.apply(StepUpdate(requests={"first": first}), {"first": 3})
    assert tables.residency.mixed_row[3] == 1
    grown = RequestUpdate(start=2, entries=[7])
    tables.apply(StepUpdate(requests={"first": grown}), {"first": 3})
    assert tables.residency.mixed_row[3] == 1
    assert tables.residency.page_frame[3, :4].tolist() == [-7, 6, 7, -1]
    second = RequestUpdate(start=0, entries=[8])
    tables.apply(StepUpdate(requests={"second": second}), {"second": 3})
    assert tables.residency.mixed_row[3] == -1
    assert tables.residency.page_frame[3, :4].tolist() == [8, -1, -1, -1]
