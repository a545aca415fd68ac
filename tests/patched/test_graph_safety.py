# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Between a step's inputs and its last attention there are only launches (D25).

All layers run on a device without values: whatever would read one, or wait, or take
new memory or data of the host, is refused, and what Python knows must not change.
Steps of different contents must make the very same launches as a capture, which comes
before any request: grid, addresses and values, on the same streams.
`test_graph_faults.py` shows that each of these checks can fail.
"""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs the patched vLLM")

from vllm.v1.hisparse.glue import backends  # noqa: E402
from vllm.v1.hisparse.messages import (  # noqa: E402
    PageCopy,
    RequestUpdate,
    StepUpdate,
)

from decoding import PADDED  # noqa: E402
from graph_guard import GraphGuard  # noqa: E402
from launch_recorder import LaunchRecorder  # noqa: E402

# Requests of a step, all with the same number of tokens.
STEPS = (["mixed", "cold"], ["cold", "full", "mixed"], ["mixed"])


@pytest.mark.parametrize("alone", [0, 1], ids=["", "a unit of one layer"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_captured_pass_has_only_launches_over_memory_that_stays(
    decoding, drafts, alone
) -> None:
    step = decoding(drafts, alone=alone)
    step.dummy()
    names = [entry[1] for entry in step.kept() if entry[0] in ("launch", "torch")]
    # The leader of each unit resolves; each layer has its rows brought. With several
    # query rows those that overflow are brought apart, for each follower.
    overflows = bool(step.world.plan.overflow_blocks)
    want = []
    for unit in step.world.units:
        want += ["_lookup_kernel", "assign_kernel"]
        followers = len(unit.unit.latents) - 1
        want += ["_fetch_kernel"] * (1 + followers * (1 + overflows))
    assert names == want and overflows == (drafts > 1)


def test_followers_rows_are_fetched_on_the_side_stream(decoding) -> None:
    step = decoding()
    step.dummy()
    stream, found = "compute", []
    for entry in step.kept():
        if entry[1] in ("is entered", "is left"):
            stream = entry[0] if entry[1] == "is entered" else "compute"
        elif entry[0] == "launch":
            found.append((entry[1], stream))
    want = []
    for followers in (4, 1):
        want += [(f"{name}_kernel", "compute") for name in ("_lookup", "assign")]
        want += [("_fetch_kernel", "compute")] + [("_fetch_kernel", "side")] * followers
    assert found == want


@pytest.mark.parametrize("drafts", [0, 3])
def test_steps_of_other_contents_make_the_launches_of_the_capture(
    decoding, drafts
) -> None:
    step = decoding(drafts)
    step.dummy()
    captured = step.kept()
    step.add_all()
    for names in STEPS:
        step.decode(names)
        assert step.world.batch.shape.is_mixed
        assert step.kept() == captured, names
    # A request that was wholly resident loses pages, and gets a lease.
    row = step.world.state_rows["full"]
    change = RequestUpdate(12, changed={0: -3}, lease=step.world.new_lease())
    step.decode(["full", "cold"], StepUpdate(requests={"full": change}))
    assert step.world.tables.lease_row[row] == 2
    assert step.kept() == captured


def test_the_captured_passes_of_a_drafter_are_as_safe(decoding) -> None:
    """Slots of its next pass are computed within the graph, too."""
    step = decoding(3)
    step.dummy()
    captured = step.kept(step.draft)
    assert [entry[1] for entry in captured].count("_slots_kernel") == 2
    step.add_all()
    for names in STEPS:
        step.decode(names)
        step.slots(len(names), PADDED)
        assert step.kept(step.draft) == captured, names


def test_a_rank_compiles_what_no_warm_up_of_vllm_reaches(decoding) -> None:
    """Before anything is captured, and before a request waits for it."""
    step = decoding()
    world, worker = step.world, step.worker
    places = world.plan.device.latents
    layers = {place.name: SimpleNamespace() for place in places}
    worker._config = SimpleNamespace(
        speculative_config=None,
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    worker.plan, worker.slab, worker.host = world.plan, world.slab, world.host
    with LaunchRecorder(run=False) as recorder:
        worker.bind(step.block_tables)
    names = [launch.name for launch in recorder.launches]
    assert names.count("_staged_rows_kernel") == 2 * len(world.units)
    assert names.count("_reset_kernel") == 1
    assert all(hasattr(layer, "hisparse") for layer in layers.values())


def everything_at_once(step) -> StepUpdate:
    """A new request, one that grows and loses a page, copies in both directions."""
    update = step.world.arrival("new", [False, True, True], leased=True)
    update.requests["full"] = RequestUpdate(
        12, [30], changed={0: -3}, lease=step.world.new_lease()
    )
    blocks = tuple(range(2, 2 + step.world.plan.device.num_stacks))
    update.restores = [PageCopy(-1, 3, 9, blocks)]
    update.write_backs = [PageCopy(7, 4, 10, blocks)]
    return update


def test_preparing_a_step_reads_nothing_from_the_device(decoding) -> None:
    step = decoding(3)
    step.add_all()
    update = everything_at_once(step)
    with GraphGuard(step.log, between_steps=True):
        step.decode(["new", "full"], update)
        for names in STEPS:
            step.decode(names)
            step.slots(len(names), PADDED)
        # The second has a tail: its lease is emptied before and after.
        step.begin({"full": 1, "cold": 20})
        step.begin({"full": 1, "cold": 1})
    ran = {entry[1] for entry in step.log}
    assert {"_slots_kernel", "_indexer_table_kernel", "_reset_kernel"} <= ran, ran
    assert "aten.index_copy_.default" in ran


def test_a_prefill_that_fits_its_lease_waits_for_nothing(decoding) -> None:
    """It runs eagerly: memory of its own is fine."""
    step = decoding()
    step.add_all()
    step.begin({"full": 1, "mixed": 20})
    assert step.world.batch.shape.tail
    topk = torch.empty((21, step.topk.shape[1]), dtype=torch.int32, device="meta")
    step.out = torch.empty_like(topk)
    with GraphGuard(step.log, between_steps=True):
        assert step.layers[0].must_resolve
        step.forward(topk)
    assert "_staged_rows_kernel" in {entry[1] for entry in step.log}


def test_the_block_table_of_a_stack_is_made_without_a_read(decoding) -> None:
    """A dense prefill of resident requests gathers its context by it."""
    step = decoding()
    step.add_all()
    step.begin({"full": 20})
    own = SimpleNamespace(
        num_decodes=0, prefill=SimpleNamespace(block_table=torch.empty(0))
    )
    with GraphGuard(step.log, between_steps=True):
        tables = [
            layer.with_own_blocks(own).prefill.block_table for layer in step.layers
        ]
        assert not any(layer.must_resolve for layer in step.layers)
    assert {table.device.type for table in tables} == {"meta"}


@pytest.mark.parametrize("kind", ["fp8_ds_mla", "auto"])
def test_flashmla_hands_over_views_and_takes_no_memory(
    decoding, monkeypatch, kind
) -> None:
    row_bytes = 656 if kind == "fp8_ds_mla" else 1152
    step = decoding(0, row_bytes=row_bytes)
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
        num_heads=4,
        _fp8_flash_mla_kernel=lambda **_: (out.unsqueeze(0), None),
        _bf16_flash_mla_kernel=lambda *_: (out, None),
    )
    metadata = SimpleNamespace(block_size=16, fp8_extra_metadata=None)
    monkeypatch.setattr(backends, "get_mla_metadata", lambda: pytest.fail("planned"))

    def forward() -> None:
        for layer in step.layers:
            got = backends.flashmla_forward(impl, layer, q, view, step.topk, metadata)
            assert got.shape == out.shape

    step.dummy()
    captured = step.kept(forward)
    step.add_all()
    step.decode(["cold", "mixed"])
    assert step.kept(forward) == captured
