# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""One capture serves every later step: residency, tables and batch change (D25)."""

import dataclasses

import pytest
import torch

from device_world import DeviceWorld
from graphs import capture

# A batch of each size, in changing order, with as many query rows as may be or fewer.
BATCHES = [([0], 2), ([2, 0, 1], 2), ([1, 2], 1), ([], 0), ([2, 1, 0], 2), ([0, 2], 2)]
RESIDENCY = (1.0, 0.0, 0.5, 0.9)


def tensors_of(world: DeviceWorld) -> dict[str, torch.Tensor]:
    """Everything that a step may write."""
    named = {
        f"{name}.{field.name}": getattr(getattr(world, name), field.name)
        for name in ("unit", "plan")
        for field in dataclasses.fields(getattr(world, name))
    }
    for name in ("rows", "code", "valid", "used", "counters", "faults", "slab"):
        named[name] = getattr(world, name)
    return named


def begin(world: DeviceWorld, step: int):
    """Change what a step finds; the same for worlds of one seed."""
    world.set_residency(RESIDENCY[step % len(RESIDENCY)])
    batch, query_rows = BATCHES[step % len(BATCHES)]
    rows_of = []
    for _ in batch:
        rows = [world.draw()]
        while len(rows) < query_rows:
            rows.append(world.draw(rows[0], keep=0.5))
        rows_of.append(rows)
    world.set_batch(batch, rows_of)
    return batch, rows_of


@pytest.mark.parametrize("hot_rows", [16, 64])
def test_a_replay_does_what_an_eager_step_does(device, hot_rows) -> None:
    replayed, eager = (
        DeviceWorld(device, hot_rows=hot_rows, query_rows=2, top_k=24, seed=3)
        for _ in range(2)
    )
    graph = capture(device, replayed.launch)
    eager.launch()
    for step in range(len(BATCHES) if device.type == "cpu" else 300):
        batch, rows_of = begin(replayed, step)
        begin(eager, step)
        graph.replay()
        eager.launch()
        replayed.check(batch, rows_of)
        wanted = tensors_of(eager)
        for name, tensor in tensors_of(replayed).items():
            # Behind a plan's entries stands what earlier steps left: the same, too.
            assert torch.equal(tensor, wanted[name]), (step, name)
    assert replayed.counters[:, 1].any(), "no step missed"


def test_capturing_padding_only_changes_nothing(device) -> None:
    world = DeviceWorld(device)
    before = {name: t.clone() for name, t in tensors_of(world).items()}
    capture(device, world.launch).replay()
    after = tensors_of(world)
    for name in ("unit.slot_pos", "unit.order", "unit.pos_slot", "slab", "counters"):
        assert torch.equal(after[name], before[name]), name
    assert (world.rows == -1).all()
