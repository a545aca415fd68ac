# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Faults that are planted into forward passes: each must be refused, or must show.

`test_graph_safety.py` has the checks.
"""

import pytest
import torch

pytest.importorskip("vllm", reason="needs the patched vLLM")

from vllm.v1.hisparse.kernels import shapes  # noqa: E402
from vllm.v1.hisparse.runtime import ahead, parts, resolver  # noqa: E402

from decoding import PADDED, Decoding  # noqa: E402
from graph_guard import GraphGuard, NotInAGraphError  # noqa: E402
from planted_faults import (  # noqa: E402
    HOST_DATA,
    MADE_BEFORE,
    NEW_MEMORY,
    READS,
    WAITS,
    plant,
)

REFUSED = [
    pytest.param(fault, text, id=f"{text}: {name}")
    for text, faults in (
        ("reads a value", READS),
        ("gives new memory", NEW_MEMORY),
        ("takes data of the host", HOST_DATA),
        ("waits", WAITS),
    )
    for name, fault in faults.items()
]


@pytest.mark.parametrize("fault, text", REFUSED)
def test_a_pass_with_a_planted_fault_is_refused(
    decoding, monkeypatch, fault, text
) -> None:
    plant(monkeypatch, fault)
    step = decoding()
    step.dummy()
    with pytest.raises(NotInAGraphError, match=text):
        step.kept()


@pytest.mark.parametrize("name, place", [("assign", 0), ("fetch_rows", 1)])
def test_a_fault_is_refused_wherever_it_is(decoding, monkeypatch, name, place) -> None:
    plant(monkeypatch, READS["item"], name, place)
    step = decoding()
    step.dummy()
    with pytest.raises(NotInAGraphError, match="reads a value"):
        step.kept()


@pytest.mark.parametrize("fault", [*READS.values(), *WAITS.values()])
def test_reads_and_waits_are_refused_between_steps_too(fault, decoding) -> None:
    step = decoding()
    with GraphGuard([], between_steps=True), pytest.raises(NotInAGraphError):
        fault(step.topk)


def test_waiting_is_refused_where_a_cpu_engine_replaced_events(monkeypatch) -> None:
    """vLLM's CPU runner does so for the process, with methods of each instance."""

    class Placeholder:
        def __init__(self) -> None:
            self.synchronize = lambda: None

    monkeypatch.setattr(torch, "Event", Placeholder)
    with GraphGuard([]), pytest.raises(NotInAGraphError, match="waits: synchronize"):
        torch.Event().synchronize()


@pytest.mark.parametrize("name", ["tensor", "as_tensor", "new_tensor", "copy", "to"])
def test_copies_that_wait_are_refused_between_steps(decoding, name) -> None:
    step = decoding()
    with (
        GraphGuard([], between_steps=True),
        pytest.raises(NotInAGraphError, match="waits: a copy"),
    ):
        HOST_DATA[name](step.topk)


# What Python knows --------------------------------------------------------------------


def remembers_leases(step: Decoding) -> None:
    step.world.tables._staged = {1}


def remembers_in_place(step: Decoding) -> None:
    step.world.tables._staged.add(1)


def remembers_what_it_knew(step: Decoding) -> None:
    step.world.tables._staged = set(step.world.tables._staged)


def counts_in_an_array(step: Decoding) -> None:
    step.world.tables.host_pages[0] += 1


def counts_in_a_module(step: Decoding) -> None:
    shapes.PASSES = getattr(shapes, "PASSES", 0) + 1


def changes_the_batch(step: Decoding) -> None:
    step.world.batch.num_requests -= 1


def has_another_tensor(step: Decoding) -> None:
    step.world.buffers.scratch = MADE_BEFORE


def has_another_view(step: Decoding) -> None:
    step.world.buffers.scratch = step.world.buffers.scratch[1:]


def points_elsewhere(step: Decoding) -> None:
    step.world.buffers.scratch.set_(MADE_BEFORE)


def keeps_something(step: Decoding) -> None:
    step.layers[0]._resolver._unit.kept = object()


@pytest.mark.parametrize(
    "fault",
    [
        remembers_leases,
        remembers_in_place,
        remembers_what_it_knew,
        counts_in_an_array,
        counts_in_a_module,
        changes_the_batch,
        has_another_tensor,
        has_another_view,
        points_elsewhere,
        keeps_something,
    ],
)
def test_a_pass_that_changes_what_python_knows_is_refused(
    decoding, monkeypatch, fault
) -> None:
    monkeypatch.setattr(shapes, "PASSES", 0, raising=False)
    step = decoding()
    plant(monkeypatch, lambda tensor: fault(step))
    step.dummy()
    with pytest.raises(NotInAGraphError, match="what Python knows"):
        step.kept()


def test_a_follower_that_reads_parts_of_another_pass_is_refused(decoding) -> None:
    step = decoding()
    step.dummy()
    with pytest.raises(NotInAGraphError, match="another pass"):
        step.kept(lambda: step.layers[1].attend(step.topk, 1, step.attend))


# What differs from the capture --------------------------------------------------------


def differs(step: Decoding) -> bool:
    """Whether a decode of some requests differs from the capture."""
    step.dummy()
    captured = step.kept()
    step.add_all()
    step.decode(["mixed", "cold"])
    return step.kept() != captured


def fills_with_a_number_of_the_step(step: Decoding, tensor: torch.Tensor) -> None:
    tensor.fill_(len(step.world.state_rows))


def clears_the_rows_of_the_step(step: Decoding, tensor: torch.Tensor) -> None:
    tensor[: len(step.world.state_rows)].zero_()


def clears_if_there_is_a_lease(step: Decoding, tensor: torch.Tensor) -> None:
    if (step.world.tables.lease_row >= 0).any():
        tensor.zero_()


@pytest.mark.parametrize(
    "fault",
    [
        fills_with_a_number_of_the_step,
        clears_the_rows_of_the_step,
        clears_if_there_is_a_lease,
    ],
)
def test_an_operation_of_torch_that_depends_on_the_step_shows(
    decoding, monkeypatch, fault
) -> None:
    step = decoding()
    plant(monkeypatch, lambda tensor: fault(step, tensor))
    assert differs(step)


def test_the_order_of_launches_and_operations_shows(decoding, monkeypatch) -> None:
    lookup = resolver.lookup
    step = decoding()

    def either(topk, *args, **sizes) -> None:
        if step.world.state_rows:
            topk.zero_()
        lookup(topk, *args, **sizes)
        if not step.world.state_rows:
            topk.zero_()

    monkeypatch.setattr(resolver, "lookup", either)
    assert differs(step)


def test_nothing_shows_where_nothing_is_planted(decoding) -> None:
    assert not differs(decoding())


def test_an_argument_that_python_counts_shows(decoding, monkeypatch) -> None:
    lookup = resolver.lookup
    calls: list[None] = []

    def counting(*args, **sizes) -> None:
        calls.append(None)
        sizes["block_stride_rows"] += len(calls) > 2
        lookup(*args, **sizes)

    monkeypatch.setattr(resolver, "lookup", counting)
    assert differs(decoding())


def test_buffers_that_take_turns_show(decoding, monkeypatch) -> None:
    step = decoding()
    buffers = step.world.buffers
    other = torch.empty_like(buffers._rows)
    turns: list[None] = []
    outputs = buffers.outputs

    def in_turn(stacks: int, tokens: slice):
        turns.append(None)
        rows, code, valid = outputs(stacks, tokens)
        if len(turns) % 4 >= 2:
            rows = other[:stacks, tokens]
        return rows, code, valid

    monkeypatch.setattr(buffers, "outputs", in_turn)
    assert differs(step)


def longest_request(step: Decoding) -> int:
    return int(step.world.tables._num_entries.max())


def requests_with_a_lease(step: Decoding) -> int:
    return int((step.world.tables.lease_row >= 0).sum())


@pytest.mark.parametrize("programs", [longest_request, requests_with_a_lease])
def test_a_grid_that_depends_on_the_step_shows(decoding, monkeypatch, programs) -> None:
    fetch_rows = parts.fetch_rows
    step = decoding()

    def as_many(*args, **sizes) -> None:
        fetch_rows(*args, programs=1 + programs(step), **sizes)

    monkeypatch.setattr(parts, "fetch_rows", as_many)
    assert differs(step)


# The side stream ----------------------------------------------------------------------


def test_work_ahead_that_is_not_joined_is_refused(decoding, monkeypatch) -> None:
    monkeypatch.setattr(ahead.SideStream, "join", lambda side, number: None)
    step = decoding()
    step.dummy()
    with pytest.raises(NotInAGraphError, match="not joined"):
        step.kept()


@pytest.mark.parametrize("method", ["start", "join"])
def test_a_side_stream_that_is_waited_for_is_refused(
    decoding, monkeypatch, method
) -> None:
    original = getattr(ahead.SideStream, method)

    def waiting(side, what) -> None:
        original(side, what)
        side._stream.synchronize()

    monkeypatch.setattr(ahead.SideStream, method, waiting)
    step = decoding()
    step.dummy()
    with pytest.raises(NotInAGraphError, match="waits: synchronize"):
        step.kept()


def test_work_on_another_stream_than_at_the_capture_shows(
    decoding, monkeypatch
) -> None:
    step = decoding()
    start = ahead.SideStream.start

    def at_once(side, pieces) -> None:
        if not step.world.state_rows:
            return start(side, pieces)
        start(side, [lambda: None for _ in pieces])
        for piece in pieces:
            piece()

    monkeypatch.setattr(ahead.SideStream, "start", at_once)
    assert differs(step)


def test_an_event_of_its_own_for_each_pass_shows(decoding, monkeypatch) -> None:
    start = ahead.SideStream.start

    def anew(side, pieces) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(side, "_fork", torch.cuda.Event())
            start(side, pieces)

    monkeypatch.setattr(ahead.SideStream, "start", anew)
    assert differs(decoding())


# The drafter's slots ------------------------------------------------------------------


def test_slots_within_a_drafter_s_graph_are_checked(decoding, monkeypatch) -> None:
    step = decoding(3)
    set_query_start = step.world.batch.set_query_start
    step.dummy()

    def by_value(query_start: torch.Tensor) -> None:
        set_query_start(query_start[: int(query_start[-1])])

    monkeypatch.setattr(step.world.batch, "set_query_start", by_value)
    with pytest.raises(NotInAGraphError, match="reads a value"):
        step.kept(step.draft)


def test_a_drafter_s_shape_that_is_set_within_its_graph_is_refused(decoding) -> None:
    """A replay would not set it: Python must before."""
    step = decoding(3)
    step.add_all()
    step.begin({"full": 1, "cold": 20})
    with pytest.raises(NotInAGraphError, match="batch.shape.tail"):
        step.kept(lambda: step.slots(2, PADDED))
