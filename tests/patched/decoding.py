# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Forward passes of a rank whose device has no values, as a capture or a step."""

from collections.abc import Callable

import pytest
import torch
from vllm.v1.hisparse.glue.block_tables import HiSparseBlockTables
from vllm.v1.hisparse.glue.worker import HiSparseLayer, HiSparseWorker
from vllm.v1.hisparse.messages import StepUpdate
from vllm.v1.hisparse.runtime.ahead import SideStream
from vllm.v1.hisparse.runtime.copies import PageCopier
from vllm.v1.hisparse.runtime.stream_copies import StreamCopies
from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
from vllm.v1.worker.gpu import buffer_utils

from fake_cuda import FakeCuda, take_meta_for_cuda
from graph_guard import GraphGuard, NotInAGraphError
from host_state import changes, host_state
from runtime_world import RuntimeWorld

PADDED = 3
# Requests of different lengths: which of their pages are resident, and have a lease.
REQUESTS = {
    "full": ([True] * 12, False),
    "mixed": ([page % 2 == 0 for page in range(7)], True),
    "cold": ([False] * 19 + [True], True),
}


class _Nothing:
    """In place of the list that a pass must make before it is used."""

    def __iter__(self) -> None:
        raise NotInAGraphError("uses what another pass has left")

    __getitem__ = __len__ = __bool__ = __iter__


NOTHING = _Nothing()


class Decoding:
    """A rank with persistent inputs, and at first no request.

    Launches must not run as long as it is used: there is nothing that they could read.

    Attributes:
        world: Its tables, memory and layers.
        block_tables: The runner's.
        log: Launches, operations and what streams are asked, of the last pass.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, drafts: int = 0, **sizes: int
    ) -> None:
        take_meta_for_cuda(monkeypatch)
        monkeypatch.setattr(buffer_utils, "UvaBuffer", UvaBuffer)
        cuda = FakeCuda(monkeypatch)
        self.log = cuda.log
        side = SideStream(torch.cuda.Stream(), most=8)
        self.world = world = RuntimeWorld(
            device="meta", ahead=side, drafts=drafts, **sizes
        )
        self.block_tables = _block_tables(world)
        self.worker = _worker(world, self.block_tables)
        self.layers = [
            HiSparseLayer(layer, self.block_tables, place.stack)
            for layer, place in zip(world.layers, world.plan.device.latents)
        ]
        self.rows = 1 + drafts
        tokens, int32 = PADDED * self.rows, {"dtype": torch.int32, "device": "meta"}
        self.topk = torch.empty((tokens, world.plan.hot.topk), **int32)
        self.out = torch.empty_like(self.topk)
        self.idx_mapping = torch.empty(PADDED, **int32)
        self.query_start = torch.empty(PADDED + 1, **int32)
        self.positions = torch.empty(256, dtype=torch.int64, device="meta")

    def add_all(self) -> None:
        """Let all requests arrive."""
        for name, (resident, leased) in REQUESTS.items():
            self.world.add(name, resident, leased)

    def dummy(self) -> None:
        """Prepare a capture."""
        self.block_tables.get_dummy_block_tables(PADDED)
        self.block_tables.get_dummy_slot_mappings(len(self.topk))

    def begin(self, counts: dict[str, int], update: StepUpdate | None = None) -> None:
        """Prepare a step with so many tokens of each request, padded as captured."""
        self._forget_parts()
        world = self.world
        rows = {world.state_rows[name]: count for name, count in counts.items()}
        self.worker.prepare_step(update or StepUpdate(), world.state_rows, rows)
        mapping = self.idx_mapping[: len(counts)]
        self.block_tables.gather_block_tables(mapping, PADDED)
        self.slots(len(counts), sum(counts.values()))

    def decode(self, names: list[str], update: StepUpdate | None = None) -> None:
        """Prepare a decode of requests."""
        self.begin({name: self.rows for name in names}, update)

    def slots(self, requests: int, tokens: int) -> torch.Tensor:
        """Compute the slots of a step, or of a drafter's next pass."""
        return self.block_tables.compute_slot_mappings(
            self.idx_mapping[:requests],
            self.query_start[: requests + 1],
            self.positions,
            tokens,
        )

    def attend(
        self, tokens: slice, rows: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        """Attention into memory that stays."""
        return self.out[tokens]

    def forward(self, topk: torch.Tensor | None = None) -> None:
        """All layers of the model, as a capture or an eager step runs them."""
        topk = self.topk if topk is None else topk
        for layer in self.layers:
            layer.attend(topk, self.world.plan.device.rows_per_block, self.attend)

    def draft(self) -> None:
        """What the graph of a drafter holds: passes of one token, and their slots."""
        for _ in range(2):
            self.forward(self.topk[:PADDED])
            self.slots(PADDED, PADDED)

    def kept(self, work: Callable[[], object] | None = None) -> list[tuple]:
        """What a graph of the forward pass, or of other work, would keep.

        Raises:
            NotInAGraphError: A graph cannot hold it.
        """
        self.log.clear()
        self._forget_parts()
        before = self.state()
        with GraphGuard(self.log):
            (work or self.forward)()
        self._forget_parts()
        if changed := changes(before, self.state()):
            raise NotInAGraphError(f"changes what Python knows: {changed}")
        _check_joined(self.log)
        return list(self.log)

    def state(self) -> dict:
        """What Python knows of the rank."""
        world = self.world
        return host_state(self.block_tables, self.layers, self.worker, world.buffers)

    def _forget_parts(self) -> None:
        """Each pass must make its own."""
        for unit in self.world.units:
            unit.parts = NOTHING  # type: ignore[assignment]


def _block_tables(world: RuntimeWorld) -> HiSparseBlockTables:
    plan = world.plan
    size = plan.device.block_size
    block_tables = HiSparseBlockTables(
        [size],
        plan.limits.max_num_seqs,
        256,
        [world.tables.residency.page_frame.shape[1]],
        world.device,
        [size],
        plan=plan,
    )
    block_tables.tables, block_tables.batch = world.tables, world.batch
    return block_tables


def _worker(world: RuntimeWorld, block_tables: HiSparseBlockTables) -> HiSparseWorker:
    worker = HiSparseWorker.__new__(HiSparseWorker)
    worker._has_begun = True
    worker._block_tables = block_tables
    to_host, to_device = (
        StreamCopies(torch.device("cuda"), lambda *addresses: None) for _ in range(2)
    )
    worker.copier = PageCopier(
        world.plan.device, world.slab, world.host, to_host, to_device
    )
    return worker


def _check_joined(log: list[tuple]) -> None:
    """A capture fails unless the compute stream waits for what was forked from it."""
    asked = ("records", "waits for")
    side = [
        n for n, entry in enumerate(log) if entry[0] == "side" and entry[1] in asked
    ]
    if not side:
        return
    _, what, event = log[side[-1]]
    if what != "records":
        raise NotInAGraphError(f"the side stream is not joined behind its fork {event}")
    if ("compute", "waits for", event) not in log[side[-1] :]:
        raise NotInAGraphError(f"the side stream is not joined behind {event}")
