# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""One damaged row or table entry makes the exactness comparison fail.

Without this, "bit-identical" could mean that nobody looked at the host's rows.
"""

import pytest
import torch

from engines import Engine, Engines
from test_hisparse_exactness import CONNECTOR, FORMATS, PROMPTS, small_budget

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Engine:
    return engines.get(**small_budget("fp32", 16), **CONNECTOR)


@pytest.fixture(scope="module")
def expected(engines: Engines):
    return engines.get(**FORMATS["fp32"]).alone(PROMPTS, NEW_TOKENS)


def differs(engine: Engine, expected) -> bool:
    actual = engine.generate(PROMPTS, NEW_TOKENS)
    pairs = zip(actual, expected, strict=True)
    return not all(got.same_output(want) for got, want in pairs)


class Once:
    """Calls a function, and does harm before or after one of the calls."""

    def __init__(self, function, *, before=None, after=None) -> None:
        self.function, self.before, self.after = function, before, after
        self.is_done = False

    def __call__(self, *args, **kwargs):
        if self.before and not self.is_done:
            self.is_done = bool(self.before(*args, **kwargs))
        result = self.function(*args, **kwargs)
        if self.after and not self.is_done:
            self.is_done = bool(self.after(*args, **kwargs))
        return result


def test_undamaged_run_is_equal(engine: Engine, expected) -> None:
    assert not differs(engine, expected)


def zero_a_planned_host_row(plan, state_row, residency, hot, host_rows, *_, **__):
    request = int(plan.count.argmax())
    if not plan.count[request]:
        return False
    host_rows[plan.src[request, 0]] = 0
    return True


def zero_a_fetched_hot_row(
    plan, state_row, residency, hot, host_rows, slab, *, stack, layer_offset, **sizes
):
    request = int(plan.count.argmax())
    if not plan.count[request]:
        return False
    mixed = residency.mixed_row[state_row[request]]
    slot, size = int(plan.slot[request, 0]), sizes["block_size"]
    block = hot.hot_blocks[mixed, stack, slot // size]
    start = layer_offset + slot % size * host_rows.shape[1]
    slab[block, start : start + host_rows.shape[1]] = 0
    return True


@pytest.mark.parametrize(
    "harm",
    [{"before": zero_a_planned_host_row}, {"after": zero_a_fetched_hot_row}],
    ids=["host row", "hot row"],
)
def test_one_damaged_row_shows(
    engine: Engine, expected, monkeypatch: pytest.MonkeyPatch, harm: dict
) -> None:
    from vllm.v1.hisparse.runtime import parts

    fetch = Once(parts.fetch_rows, **harm)
    monkeypatch.setattr(parts, "fetch_rows", fetch)
    assert differs(engine, expected)
    assert fetch.is_done
    monkeypatch.undo()
    assert not differs(engine, expected)


def test_one_damaged_residency_entry_shows(
    engine: Engine, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = engine.runner.block_tables.tables

    def point_a_page_at_another_frame(update, state_rows) -> bool:
        for row in state_rows.values():
            resident = (tables.residency.page_frame[row] >= 0).nonzero().flatten()
            if len(resident) > 4 and tables.residency.mixed_row[row] < 0:
                page = tables.residency.page_frame[row]
                page[resident[1]] = page[resident[2]]
                return True
        return False

    apply = Once(tables.apply, after=point_a_page_at_another_frame)
    monkeypatch.setattr(tables, "apply", apply)
    assert differs(engine, expected)
    assert apply.is_done
    monkeypatch.undo()
    assert not differs(engine, expected)


def test_lost_residency_is_an_error_not_a_guess(engine: Engine) -> None:
    """A selected row that is nowhere stops the step."""
    from vllm.v1.hisparse.runtime.batch import StepShape

    block_tables = engine.runner.block_tables
    tables, batch = block_tables.tables.residency, block_tables.batch
    saved = tables.page_frame[0].clone(), tables.mixed_row[0].clone()
    tables.page_frame[0], tables.mixed_row[0] = -1, -1
    batch.set_requests(torch.zeros(1, dtype=torch.int32), 1)
    batch.set_query_start(torch.tensor([0, 1]))
    batch.token_request[0] = 0
    topk = torch.zeros(1, 32, dtype=torch.int32)
    for is_mixed in (False, True):
        batch.shape = StepShape(is_mixed)
        with pytest.raises(AssertionError, match="neither on the device"):
            engine.worker.units[0].resolve(batch, topk, 16)
    engine.worker.buffers.faults.zero_()
    tables.page_frame[0], tables.mixed_row[0] = saved
