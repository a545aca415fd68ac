# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Between a step's inputs and its last attention there are only launches (D25).

All layers run on a device without values: whatever would read one, or wait, or take
new memory, is refused. Steps of different contents must make the very same launches,
and those of a capture: grid, addresses and values. Faults that are planted show that
each of these checks can fail.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs the patched vLLM")

from vllm.v1.hisparse.glue import backends  # noqa: E402
from vllm.v1.hisparse.glue.worker import HiSparseLayer  # noqa: E402
from vllm.v1.hisparse.messages import RequestUpdate, StepUpdate  # noqa: E402
from vllm.v1.hisparse.runtime import parts, resolver  # noqa: E402

from graph_guard import GraphGuard, NotInAGraphError, kept_by_a_graph  # noqa: E402
from launch_recorder import LaunchRecorder  # noqa: E402
from runtime_world import RuntimeWorld  # noqa: E402

PADDED = 3
HALF = [page % 2 == 0 for page in range(12)]
# Requests of a step, all with the same number of tokens.
STEPS = (["mixed", "cold"], ["cold", "full", "mixed"], ["mixed"])


class Decoding:
    """A rank on a device without values, with a persistent buffer of picks."""

    def __init__(self, drafts: int, row_bytes: int = 128) -> None:
        self.world = RuntimeWorld(device="meta", drafts=drafts, row_bytes=row_bytes)
        self.world.tables.use_kernels = True
        # The tables have no words to be written.
        self.world.tables._words.flush = lambda: None  # type: ignore[method-assign]
        self.rows = 1 + drafts
        shape = (PADDED * self.rows, self.world.plan.hot.topk)
        self.topk = torch.empty(shape, dtype=torch.int32, device="meta")
        self.out = torch.empty(shape, dtype=torch.int32, device="meta")
        self.world.add("full", [True] * 12, leased=False)
        self.world.add("mixed", HALF, leased=True)
        self.world.add("cold", [False] * 11 + [True], leased=True)

    def attend(self, tokens: slice, rows: torch.Tensor, valid: torch.Tensor):
        """Attention into memory that stays."""
        return self.out[tokens]

    def forward(self, tokens: int | None = None) -> None:
        """All layers of the model, as a capture or an eager step runs them."""
        stride = self.world.plan.device.rows_per_block
        tokens = tokens or len(self.topk)
        for layer in self.world.layers:
            layer.attend(self.world.batch, self.topk[:tokens], stride, self.attend)

    def begin(self, names: list[str]) -> None:
        """Prepare a step; the batch is padded to its captured size."""
        self.world.start({name: self.rows for name in names})
        self.world.batch.num_requests = PADDED

    def launches(self, tokens: int | None = None) -> list[tuple]:
        """What a graph of the forward pass would keep."""
        with LaunchRecorder(run=False) as recorder, GraphGuard():
            self.forward(tokens)
        return [kept_by_a_graph(launch) for launch in recorder.launches]


@pytest.fixture
def decoding() -> Iterator[Callable[..., Decoding]]:
    # Tables are made by launches, too, which a device without values cannot run.
    with LaunchRecorder(run=False):
        yield Decoding


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_captured_pass_has_only_launches_over_memory_that_stays(
    decoding, drafts
) -> None:
    step = decoding(drafts)
    step.world.batch.set_dummy(PADDED)
    names = [launch[0] for launch in step.launches()]
    # Leaders of 5 and 2 layers resolve; each layer has its rows brought. With several
    # query rows those that overflow are brought apart, for each follower.
    overflows = bool(step.world.plan.overflow_blocks)
    want = []
    for unit in step.world.units:
        want += ["_lookup_kernel", "assign_kernel"]
        followers = len(unit.unit.latents) - 1
        want += ["_fetch_kernel"] * (1 + followers * (1 + overflows))
    assert names == want and overflows == (drafts > 1)


@pytest.mark.parametrize("drafts", [0, 3])
def test_steps_of_other_contents_make_the_launches_of_the_capture(
    decoding, drafts
) -> None:
    step = decoding(drafts)
    step.world.batch.set_dummy(PADDED)
    captured = step.launches()
    for names in STEPS:
        step.begin(names)
        assert step.world.batch.shape.is_mixed
        assert step.launches() == captured, names
    # A request that was wholly resident loses pages, and gets a lease.
    row = step.world.state_rows["full"]
    change = RequestUpdate(12, changed={0: -3}, lease=step.world.new_lease())
    update = StepUpdate(requests={"full": change})
    step.world.tables.apply(update, step.world.state_rows)
    assert step.world.tables.lease_row[row] == 2
    step.begin(["full", "cold"])
    assert step.launches() == captured


def test_a_drafter_s_steps_are_as_safe_as_the_target_s(decoding) -> None:
    step = decoding(3)
    step.world.batch.set_dummy(PADDED)
    captured = step.launches(PADDED)
    step.begin(STEPS[1])
    step.world.batch.shape = step.world.batch.shape.decoding()
    assert step.launches(PADDED) == captured


def test_preparing_a_step_reads_nothing_from_the_device(decoding) -> None:
    step = decoding(3)
    table = torch.empty((4, 20), dtype=torch.int32, device="meta")
    with GraphGuard(new_memory=True):
        for names in STEPS:
            step.begin(names)
            step.world.tables.indexer_table(step.world.batch, table)


@pytest.mark.parametrize("kind", ["fp8_ds_mla", "auto"])
def test_flashmla_hands_over_views_and_takes_no_memory(
    decoding, monkeypatch, kind
) -> None:
    row_bytes = 656 if kind == "fp8_ds_mla" else 1152
    step = decoding(0, row_bytes)
    dtype = torch.uint8 if kind == "fp8_ds_mla" else torch.bfloat16
    device, size = step.world.plan.device, dtype.itemsize
    view = torch.as_strided(
        step.world.slab.view(dtype),
        (step.world.plan.num_blocks, 16, row_bytes // size),
        (device.block_bytes // size, row_bytes // size, 1),
        0,
    )
    q = torch.empty((PADDED, 4, 576), dtype=torch.bfloat16, device="meta")
    out = torch.empty((PADDED, 4, 512), dtype=torch.bfloat16, device="meta")
    impl = SimpleNamespace(
        kv_cache_dtype=kind,
        _fp8_flash_mla_kernel=lambda **_: (out.unsqueeze(0), None),
        _bf16_flash_mla_kernel=lambda *_: (out, None),
    )
    metadata = SimpleNamespace(block_size=16, fp8_extra_metadata=None)
    monkeypatch.setattr(backends, "get_mla_metadata", lambda: pytest.fail("planned"))
    layers = [
        HiSparseLayer(layer, SimpleNamespace(batch=step.world.batch), 0)
        for layer in step.world.layers
    ]

    def launches() -> list[tuple]:
        with LaunchRecorder(run=False) as recorder, GraphGuard():
            for layer in layers:
                got = backends.flashmla_forward(
                    impl, layer, q, view, step.topk, metadata
                )
                assert got.shape == out.shape
        return [kept_by_a_graph(launch) for launch in recorder.launches]

    step.world.batch.set_dummy(PADDED)
    captured = launches()
    step.begin(["cold", "mixed"])
    assert launches() == captured


# Planted faults ---------------------------------------------------------------------


def reads_a_value(tensor: torch.Tensor) -> torch.Tensor:
    tensor.flatten()[0].item()
    return tensor


def branches_on_a_value(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.flatten()[0] else tensor


def copies_to_the_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor.tolist()
    return tensor


def waits(tensor: torch.Tensor) -> torch.Tensor:
    torch.cuda.synchronize()
    return tensor


def copies(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def makes_a_tensor(tensor: torch.Tensor) -> torch.Tensor:
    torch.zeros(4, device=tensor.device)
    return tensor


def selects_by_value(tensor: torch.Tensor) -> torch.Tensor:
    tensor[tensor > 0]
    return tensor


@pytest.mark.parametrize(
    "fault, text",
    [
        (reads_a_value, "reads a value"),
        (branches_on_a_value, "reads a value"),
        (copies_to_the_host, "reads a value"),
        (waits, "waits: synchronize"),
        (copies, "new memory"),
        (makes_a_tensor, "new memory"),
        (selects_by_value, "new memory|reads a value"),
    ],
)
@pytest.mark.parametrize("name", ["lookup", "assign", "fetch_rows"])
def test_a_planted_fault_is_refused(decoding, monkeypatch, name, fault, text) -> None:
    module, place = (parts, 1) if name == "fetch_rows" else (resolver, 0)
    launcher = getattr(module, name)

    def planted(*args, **sizes) -> None:
        changed = fault(args[place])
        launcher(*args[:place], changed, *args[place + 1 :], **sizes)

    monkeypatch.setattr(module, name, planted)
    step = decoding(0)
    step.world.batch.set_dummy(PADDED)
    with pytest.raises(NotInAGraphError, match=text):
        step.launches()


def test_python_state_that_a_pass_changes_shows(decoding, monkeypatch) -> None:
    lookup = resolver.lookup
    calls: list[None] = []

    def counting(*args, **sizes) -> None:
        calls.append(None)
        sizes["block_stride_rows"] += len(calls) > 2
        lookup(*args, **sizes)

    monkeypatch.setattr(resolver, "lookup", counting)
    step = decoding(0)
    step.world.batch.set_dummy(PADDED)
    assert step.launches() != step.launches()


def test_buffers_that_take_turns_show(decoding, monkeypatch) -> None:
    step = decoding(0)
    buffers = step.world.buffers
    other = torch.empty_like(buffers._rows)
    turns: list[None] = []
    outputs = buffers.outputs

    def in_turn(stacks: int, tokens: int):
        turns.append(None)
        rows, code, valid = outputs(stacks, tokens)
        if len(turns) % 4 >= 2:
            rows = other[:stacks, :tokens]
        return rows, code, valid

    monkeypatch.setattr(buffers, "outputs", in_turn)
    step.world.batch.set_dummy(PADDED)
    assert step.launches() != step.launches()


def test_a_grid_that_depends_on_the_step_shows(decoding, monkeypatch) -> None:
    fetch_rows = parts.fetch_rows
    step = decoding(0)

    def as_many_as_requests(*args, **sizes) -> None:
        fetch_rows(*args, programs=1 + len(step.world.batch.shape.tail), **sizes)

    monkeypatch.setattr(parts, "fetch_rows", as_many_as_requests)
    step.world.batch.set_dummy(PADDED)
    captured = step.launches()
    tail = SimpleNamespace(first=10**6, request=0)
    step.world.batch.shape = SimpleNamespace(is_mixed=True, tail=[tail])
    assert step.launches() != captured
