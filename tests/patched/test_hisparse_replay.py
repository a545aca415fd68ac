# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What a CUDA graph keeps of a decode is enough for every later step (trap 1, D25).

A graph keeps the launches of its capture with the tensors they were given, and no
Python. Here the launches of a dummy batch are recorded while there is no request, and
then run again over real steps: other requests, other lengths, other residency.
"""

import pytest
import torch

pytest.importorskip("vllm", reason="needs the patched vLLM")

from vllm.v1.hisparse.messages import RequestUpdate, StepUpdate  # noqa: E402
from vllm.v1.hisparse.runtime import parts, resolver  # noqa: E402

from runtime_world import RuntimeWorld  # noqa: E402

PADDED = 4
# Requests of different lengths, one of them shorter than the top-k: which of their
# pages are resident, and whether they have a lease.
REQUESTS = {
    "full": ([True] * 12, False),
    "mixed": ([page % 2 == 0 for page in range(7)], True),
    "cold": ([False] * 19 + [True], True),
    "short": ([False], True),
}


class Graph:
    """Launches of one capture, in order, and each layer's rows and counts."""

    def __init__(
        self, world: RuntimeWorld, topk: torch.Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.world, self.topk = world, topk
        self._launches: list = []
        self._layers: list = []
        with monkeypatch.context() as patch:
            for module, name in (
                (resolver, "lookup"),
                (resolver, "assign"),
                (parts, "fetch_rows"),
            ):
                patch.setattr(module, name, self._recorded(getattr(module, name)))
            world.batch.set_dummy(PADDED)
            stride = world.plan.device.rows_per_block
            for number, layer in enumerate(world.layers):
                layer.attend(world.batch, topk, stride, self._attention(number))

    def _recorded(self, launcher):
        def launch(*args, **sizes) -> None:
            self._launches.append(lambda: launcher(*args, **sizes))
            launcher(*args, **sizes)

        return launch

    def _attention(self, number: int):
        def attention(tokens, rows, valid):
            assert tokens == slice(0, len(self.topk))
            self._launches.append(lambda: self._read(number, rows, valid))
            return rows

        return attention

    def _read(self, number: int, rows: torch.Tensor, valid: torch.Tensor) -> None:
        """Attention of a layer: what it reads must be the selected rows."""
        want = self.world.selected(number, self.topk)
        got = self.world.read(number, rows)
        assert torch.equal(got, want), number
        counts = (self.topk >= 0).sum(1).int()
        owner = self.world.batch.token_request[: len(counts)]
        assert torch.equal(valid, counts * (owner >= 0))
        self._layers.append(number)

    def replay(self, topk: torch.Tensor) -> None:
        """Run the launches over what the persistent tensors hold now."""
        self.topk.fill_(7)  # what padded tokens find
        self.topk[: len(topk)] = topk
        self._layers.clear()
        for launch in self._launches:
            launch()
        assert self._layers == list(range(len(self.world.layers)))
        assert not self.world.buffers.faults.any()


def add_all(world: RuntimeWorld) -> None:
    for name, (resident, leased) in REQUESTS.items():
        world.add(name, resident, leased)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_captured_decode_replays_over_changing_steps(drafts, monkeypatch) -> None:
    world = RuntimeWorld(drafts=drafts)
    rows = 1 + drafts
    topk = torch.full((PADDED * rows, 32), -1, dtype=torch.int32)
    graph = Graph(world, topk, monkeypatch)
    add_all(world)
    steps = [
        {"full": rows},
        {"mixed": rows, "full": rows},
        {"cold": rows, "full": rows, "short": rows, "mixed": rows},
        {"mixed": rows, "cold": rows},
    ]
    for step, counts in enumerate(steps * 2):
        world.start(counts)
        graph.replay(world.draw(counts))
        if step == 3:
            # The request that was wholly resident loses half of its pages.
            row = world.state_rows["full"]
            entries = world.tables.residency.page_frame[row, :12].tolist()
            evicted = {page: -2 - entries[page] for page in range(0, 12, 2)}
            lease = world.new_lease()
            change = RequestUpdate(12, changed=evicted, lease=lease)
            update = StepUpdate(requests={"full": change})
            world.tables.apply(update, world.state_rows)
    misses = world.buffers.counters[:, :, 1].sum(1)
    assert (misses > 0).all()


def test_the_capture_of_a_dummy_batch_leaves_no_trace(monkeypatch) -> None:
    world = RuntimeWorld()
    add_all(world)
    before = [
        state.clone() for unit in world.tables.units for state in vars(unit).values()
    ]
    slab = world.slab.clone()
    Graph(world, torch.zeros(PADDED, 32, dtype=torch.int32), monkeypatch)
    after = [state for unit in world.tables.units for state in vars(unit).values()]
    assert all(map(torch.equal, before, after)) and torch.equal(world.slab, slab)
    assert not world.buffers.counters.any() and not world.buffers.used.any()
