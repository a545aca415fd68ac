# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""A rank's tables, memory and layers without an engine: requests, pages and bytes."""

import torch
from vllm.v1.hisparse.capacity import HotSizes, Limits, PoolPlan, plan_pools
from vllm.v1.hisparse.layout import IndexerLayer, LatentLayer, plan_device
from vllm.v1.hisparse.messages import HotLease, RequestUpdate, StepUpdate
from vllm.v1.hisparse.runtime.ahead import Ahead, InOrder
from vllm.v1.hisparse.runtime.batch import Batch
from vllm.v1.hisparse.runtime.buffers import ResolverBuffers
from vllm.v1.hisparse.runtime.host_pool import CudaRegistrar, HostPool
from vllm.v1.hisparse.runtime.parts import LayerMemory
from vllm.v1.hisparse.runtime.resolver import LayerResolver, UnitResolver
from vllm.v1.hisparse.runtime.tables import ResidencyTables

POISON = 0xEE


def small_plan(
    *,
    topk: int = 32,
    hot_rows: int = 64,
    drafts: int = 0,
    row_bytes: int = 128,
    token_bytes: int = 132,
    alone: int = 0,
) -> PoolPlan:
    """Seven latents, two index units, pages of 16 tokens; four stacks by default.

    And `alone` latents behind them, with an indexer each.
    """
    latents = [LatentLayer(f"{i}.attn", i, row_bytes) for i in range(7 + alone)]
    indexed = (0, 5, *range(7, 7 + alone))
    indexers = [IndexerLayer(f"{i}.indexer", i, token_bytes) for i in indexed]
    device = plan_device(latents, indexers, block_size=16)
    limits = Limits(max_model_len=512, max_num_seqs=4, window_tokens=64, step_tokens=64)
    sizes = HotSizes(topk=topk, hot_rows=hot_rows, drafts=drafts)
    host_bytes = 60 * device.host_page_bytes
    return plan_pools(device, sizes, limits, 700, host_bytes)


class RuntimeWorld:
    """Requests with random bytes on the host, and copies of resident pages.

    Args:
        seed: Of everything that is random.
        device: Where the device pool lies; the host pool is pinned for a GPU.
        ahead: Fetches rows of followers ahead of them.
        sizes: Of `small_plan`.
    """

    def __init__(
        self,
        seed: int = 0,
        device: torch.device | str = "cpu",
        ahead: Ahead | None = None,
        **sizes: int,
    ) -> None:
        self.device = torch.device(device)
        registrar = CudaRegistrar() if self.device.type == "cuda" else None
        self.plan = plan = small_plan(**sizes)
        self.random = torch.Generator().manual_seed(seed)
        self.tables = ResidencyTables(plan, plan.limits.max_num_seqs, self.device)
        self.host = HostPool(plan.device, plan.num_pages, registrar)
        self.host.buffer.random_(0, 256, generator=self.random)
        shape = (plan.num_blocks, plan.device.block_bytes)
        self.slab = torch.full(shape, POISON, dtype=torch.uint8, device=self.device)
        num_pages = self.tables.residency.page_frame.shape[1]
        self.buffers = ResolverBuffers(plan, num_pages, self.device)
        self.units = [
            UnitResolver(self.tables, self.buffers, u, ahead or InOrder())
            for u in range(len(plan.device.units))
        ]
        self.layers = [
            LayerResolver(
                self.units[place.unit],
                LayerMemory(
                    place, self.tables, self.host.layers[place.name], self.slab
                ),
            )
            for place in plan.device.latents
        ]
        host_table = torch.zeros_like(self.tables.residency.page_frame)
        self.batch = Batch(plan.limits.max_num_seqs, 256, host_table)
        self.state_rows: dict[str, int] = {}
        self.num_pages: dict[str, int] = {}
        self._free_blocks = list(range(1, plan.num_blocks))
        self._free_pages = list(range(1, plan.num_pages))
        self._free_frames = list(range(1, plan.max_frames))
        self._num_leases = 0

    def add(self, name: str, resident: list[bool], leased: bool) -> None:
        """Add a request whose pages are resident as given, the others host-only."""
        self.tables.apply(self.arrival(name, resident, leased), self.state_rows)

    def arrival(self, name: str, resident: list[bool], leased: bool) -> StepUpdate:
        """Add a request, but for the update of the tables, which is returned."""
        row = len(self.state_rows)
        self.state_rows[name], self.num_pages[name] = row, len(resident)
        update, entries = StepUpdate(), []
        for page, is_resident in enumerate(resident):
            host_page = self._free_pages.pop()
            self.batch.host_table[row, page] = host_page
            frame = self._free_frames.pop(0)
            count = self.plan.device.frame_blocks if is_resident else 1
            blocks = [self._free_blocks.pop(0) for _ in range(count)]
            if is_resident:
                self._fill(host_page, blocks)
            absent = [0] * (self.plan.device.frame_blocks - count)
            update.frames[frame] = (*blocks, *absent)
            entries.append(frame if is_resident else -2 - frame)
        lease = self.new_lease() if leased else None
        update.requests[name] = RequestUpdate(0, entries, lease=lease)
        return update

    def new_lease(self) -> HotLease:
        """Take the blocks of another lease."""
        wanted = range(self.plan.lease_blocks)
        blocks = tuple(self._free_blocks.pop() for _ in wanted)
        self._num_leases += 1
        return HotLease(self._num_leases - 1, blocks)

    def _fill(self, host_page: int, blocks: list[int]) -> None:
        size = self.plan.device.latent_page_bytes
        for place in self.plan.device.latents:
            own = self.slab[blocks[1 + place.stack]]
            page = self.host.layers[place.name][host_page]
            own[place.byte_offset : place.byte_offset + size] = page

    def start(self, counts: dict[str, int]) -> None:
        """Begin a step with so many tokens of each request."""
        rows = [self.state_rows[name] for name in counts]
        tables = self.tables
        self.batch.set_requests(torch.tensor(rows), len(rows))
        starts = torch.tensor([0, *counts.values()]).cumsum(0)
        self.batch.set_query_start(starts)
        self.batch.shape = tables.begin_step(dict(zip(rows, counts.values())))
        slots = torch.empty(self.plan.device.frame_blocks, 256, dtype=torch.int64)
        slots = slots.to(self.device)
        tables.slots(self.batch, torch.zeros_like(slots[0]), slots)

    def draw(
        self, counts: dict[str, int], num_pages: int | None = None
    ) -> torch.Tensor:
        """Distinct random positions for each token, int32 ``[T, K]``.

        Of so many pages, by default all that the token's request has.
        """
        topk = self.plan.hot.topk
        rows = []
        owners = [name for name, count in counts.items() for _ in range(count)]
        for owner in owners:
            length = 16 * (num_pages or self.num_pages[owner])
            order = torch.full((topk,), -1)
            drawn = torch.randperm(length, generator=self.random)[:topk]
            order[: len(drawn)] = drawn
            order[torch.rand(topk, generator=self.random) < 0.1] = -1
            rows.append(order.int())
        return torch.stack(rows).to(self.device)

    def attend(self, topk: torch.Tensor) -> list[int]:
        """Let all layers read the selected rows, and check what they read.

        Returns:
            Number of parts that each layer took.
        """
        num_parts = []
        for number, layer in enumerate(self.layers):
            calls: list[slice] = []

            def read(tokens, rows, valid, number=number, calls=calls):
                calls.append(tokens)
                assert torch.equal(valid, (rows >= 0).sum(1).int())
                return self.read(number, rows)

            stride = self.plan.device.rows_per_block
            got = layer.attend(self.batch, topk, stride, read)
            name = self.plan.device.latents[number].name
            assert torch.equal(got.cpu(), self.selected(number, topk)), name
            num_parts.append(len(calls))
        return num_parts

    def selected(self, layer: int, topk: torch.Tensor) -> torch.Tensor:
        """Host bytes of selected rows, 0 for padding: uint8 ``[T, K, row_bytes]``.

        On the CPU, wherever the device pool is.
        """
        device, topk = self.plan.device, topk.cpu()
        owner = self.batch.token_request[: len(topk)].long().cpu()
        states = self.batch.state_row.cpu()[owner].long().unsqueeze(1)
        positions = topk.clamp(min=0).long()
        pages = self.batch.host_table.cpu()[states, positions // 16].long()
        host_rows = self.host.layers[device.latents[layer].name]
        picked = host_rows.view(-1, device.row_bytes)[pages * 16 + positions % 16]
        picked[(topk < 0) | (owner < 0).unsqueeze(1)] = 0
        return picked

    def read(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Bytes of physical rows in a layer's view of the pool, 0 for -1."""
        device = self.plan.device
        flat = self.slab.flatten()[device.latents[layer].byte_offset :]
        out = flat.unfold(0, device.row_bytes, device.row_bytes)[
            rows.clamp(min=0).long()
        ].clone()
        return out.masked_fill_((rows < 0).unsqueeze(-1), 0)
