# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Kernels read the host pool in place, however it was pinned (D24)."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.v1.hisparse.kernels.fetch import fetch_rows
from vllm.v1.hisparse.kernels.staged_rows import copy_pages
from vllm.v1.hisparse.kernels.tensors import FetchPlan, HotBlocks, Residency
from vllm.v1.hisparse.runtime.host_pool import CudaRegistrar, HostPool
from vllm.v1.hisparse.runtime.shared_memory import ONE_RANK

from runtime_world import small_plan
from under_test import needs_gpu

SIZE, ROW_BYTES, BLOCKS = 16, 128, 9


class FirstOfTwo:
    """A rank that shares its host pool; the other one does nothing."""

    rank, node = 0, (0, 1)

    def exchange(self, value: Any) -> list[Any]:
        return [value, value]


@pytest.fixture(params=["registered", "shared", "pinned"])
def host(device, request) -> Iterator[torch.Tensor]:
    """Rows of a layer in host memory: uint8 ``[rows, ROW_BYTES]``."""
    if request.param == "pinned":
        host = torch.empty(40 * SIZE, ROW_BYTES, dtype=torch.uint8)
        yield (host.pin_memory() if device.type == "cuda" else host).random_(0, 256)
        return
    plan = small_plan(row_bytes=ROW_BYTES).device
    pool = HostPool(
        plan,
        40,
        CudaRegistrar() if device.type == "cuda" else None,
        sharers=FirstOfTwo() if request.param == "shared" else ONE_RANK,
    )
    # Not the first layer of the pool, so that the address has an offset.
    layer = pool.layers[plan.latents[3].name].view(-1, ROW_BYTES)
    yield layer.random_(0, 256)
    pool.close()


def tensor(device: torch.device, values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def fetch(device, host: torch.Tensor, sources: list[int]) -> torch.Tensor:
    """The rows that a fetch of these host rows brings to the device."""
    block_bytes = SIZE * ROW_BYTES
    slab = torch.full((BLOCKS, block_bytes), 0xFF, dtype=torch.uint8, device=device)
    slots, count = list(range(len(sources))), [len(sources)]
    plan = FetchPlan(*(tensor(device, x) for x in ([sources], [slots], count, count)))
    residency = Residency(*(tensor(device, x) for x in ([[0]], [[0, 0]], [0])))
    leased = list(range(1, BLOCKS))
    hot = HotBlocks(tensor(device, [[leased]]), tensor(device, [[0]]))
    fetch_rows(
        plan, tensor(device, [0]), residency, hot, host, slab, stack=0, layer_offset=0,
        hot_rows=len(leased) * SIZE, block_size=SIZE,
    )  # fmt: skip
    return slab[1:].view(-1, ROW_BYTES)[: len(sources)].cpu()


def test_rows_of_the_host_pool_are_read_in_place(device, host) -> None:
    sources = torch.randperm(len(host))[: (BLOCKS - 1) * SIZE]
    assert torch.equal(fetch(device, host, sources.tolist()), host[sources])


def test_a_row_that_changed_on_the_host_is_read_anew(device, host) -> None:
    for value in range(20):
        host[7] = value
        assert (fetch(device, host, [7]) == value).all()


def test_pages_of_the_host_pool_are_staged_from_it(device, host) -> None:
    pages = host.view(-1, SIZE * ROW_BYTES)
    slab = torch.full((BLOCKS, pages.shape[1]), 0xFF, dtype=torch.uint8, device=device)
    residency = Residency(*(tensor(device, x) for x in ([[0]], [[0, 0]], [0])))
    hot = HotBlocks(tensor(device, [[[3, 5]]]), tensor(device, [[8]]))
    copy_pages(
        tensor(device, [[30, 2, 17]]), tensor(device, [3]), tensor(device, [0]),
        residency, hot, pages, slab, layer_offset=0,
    )  # fmt: skip
    assert torch.equal(slab[[3, 5, 8]].cpu(), pages[[30, 2, 17]])
    assert (slab[[0, 1, 2, 4, 6, 7]] == 0xFF).all()


@needs_gpu
def test_rows_behind_4_gib_of_a_host_pool_are_read(device) -> None:
    rows = (5 << 30) // ROW_BYTES
    host = torch.empty(rows, ROW_BYTES, dtype=torch.uint8, pin_memory=True)
    sources = [3, (1 << 31) // ROW_BYTES + 1, (1 << 32) // ROW_BYTES + 2, rows - 1]
    for value, source in enumerate(sources):
        host[source] = value + 1
    got = fetch(device, host, sources)
    assert got[:, 0].tolist() == [1, 2, 3, 4]


@needs_gpu
def test_memory_that_is_not_pinned_is_refused(device) -> None:
    host = torch.zeros(64, ROW_BYTES, dtype=torch.uint8)
    with pytest.raises(ValueError, match="cpu tensor"):
        fetch(device, host, [1])
