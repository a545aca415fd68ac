# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Launches over copies see what the originals hold, and nothing else."""

from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl

from crossing import DEVICE, IN_HOST_MEMORY, ON_GPU, Crossing, crossing_to

TO = DEVICE or "cpu"


@triton.jit
def _add_kernel(source_ptr, target_ptr, at):
    tl.store(target_ptr + at, tl.load(source_ptr + at) + 1)


@dataclass(frozen=True)
class Pair:
    source: torch.Tensor
    target: torch.Tensor


def add(pair: Pair, *, at: int) -> None:
    _add_kernel[(1,)](pair.source, pair.target, at)


add_there = crossing_to(TO, add)


def numbers(size: int = 8) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int32)


def test_what_a_launch_wrote_comes_back():
    pair = Pair(numbers(), torch.zeros(8, dtype=torch.int32))
    add_there(pair, at=3)
    assert pair.target.tolist() == [0, 0, 0, 4, 0, 0, 0, 0]
    assert torch.equal(pair.source, numbers())


def test_views_of_one_memory_stay_views_of_one_memory():
    memory = numbers(12)
    pair = Pair(memory[2:], memory.view(3, 4)[1])
    add_there(pair, at=1)
    assert memory.tolist() == [0, 1, 2, 3, 4, 4, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("at", [-1, 8])
def test_a_store_outside_the_arguments_is_found(at):
    pair = Pair(numbers(64)[8:], torch.zeros(8, dtype=torch.int32))
    with pytest.raises(AssertionError, match="wrote outside"):
        add_there(pair, at=at)


@pytest.mark.parametrize("name", ["slab", *IN_HOST_MEMORY])
def test_host_pools_cross_into_host_memory(name):
    moved = Crossing(TO).move(numbers(), name)
    is_pool = name in IN_HOST_MEMORY
    assert moved.device.type == ("cpu" if is_pool else TO.partition(":")[0])
    assert moved.is_pinned() == (is_pool and ON_GPU)
