# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The detector finds planted races, and needs every barrier of the kernels."""

import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from kernels.reset import reset_rows
from kernels.staging import list_pages

import kernels
from race_detector import RaceDetector
from world import World, stream


@triton.jit
def _shift(ptr, BARRIER: tl.constexpr):
    i = tl.arange(0, 8)
    x = tl.load(ptr + i)
    if BARRIER:
        tl.debug_barrier()
    tl.store(ptr + i + 1, x)


@triton.jit
def _write_then_read(ptr, out_ptr, BARRIER: tl.constexpr):
    i = tl.arange(0, 8)
    tl.store(ptr + i, i)
    if BARRIER:
        tl.debug_barrier()
    tl.store(out_ptr + i, tl.load(ptr + 7 - i))


@triton.jit
def _write_twice(ptr, BARRIER: tl.constexpr):
    i = tl.arange(0, 8)
    tl.store(ptr + i, i)
    if BARRIER:
        tl.debug_barrier()
    tl.store(ptr + 7 - i, i)


@triton.jit
def _write_across(ptr, SAME_VALUE: tl.constexpr):
    value = tl.program_id(0)
    if SAME_VALUE:
        value = 1
    tl.store(ptr, value)


@triton.jit
def _read_across(ptr):
    x = tl.load(ptr + tl.program_id(0) + 1)
    tl.store(ptr + tl.program_id(0), x)


def launch(kernel, grid, *args):
    with RaceDetector() as detector:
        kernel[grid](*args)
    return {race.kind for race in detector.races}


@pytest.mark.parametrize("barrier", [False, True])
def test_missing_barriers_within_a_program_are_found(barrier):
    data, out = (torch.zeros(16, dtype=torch.int32) for _ in range(2))
    found = {
        "WAR": launch(_shift, (1,), data, barrier),
        "RAW": launch(_write_then_read, (1,), data, out, barrier),
        "WAW": launch(_write_twice, (1,), data, barrier),
    }
    for kind, kinds in found.items():
        assert kinds == (set() if barrier else {kind})


def test_a_partly_overlapping_access_of_another_width_is_found():
    data = torch.zeros(16, dtype=torch.int32)

    @triton.jit
    def narrow(ptr, byte_ptr):
        tl.store(ptr + tl.arange(0, 4), 0)
        tl.store(byte_ptr + 7, 1)

    with RaceDetector() as detector:
        narrow[(1,)](data, data.view(torch.int8))
    assert [race.kind for race in detector.races] == ["WAW"]


def test_masked_lanes_are_not_accesses():
    data = torch.zeros(16, dtype=torch.int32)

    @triton.jit
    def halves(ptr):
        i = tl.arange(0, 8)
        tl.store(ptr + i, 1, mask=i < 4)
        tl.store(ptr + i, 2, mask=i >= 4)

    assert launch(halves, (1,), data) == set()


def test_writes_of_two_programs_to_one_address_are_found_unless_equal():
    data = torch.zeros(1, dtype=torch.int32)
    assert launch(_write_across, (2,), data, False) == {"cross-program WAW"}
    assert launch(_write_across, (2,), data, True) == set()


def test_reads_of_what_another_program_writes_are_found():
    data = torch.zeros(8, dtype=torch.int32)
    assert launch(_read_across, (4,), data) == {"cross-program WAR"}


def test_barriers_are_seen_where_vllm_made_them_do_nothing(monkeypatch):
    monkeypatch.setattr(tl, "debug_barrier", lambda *args, **kwargs: None)
    assert launch(_shift, (1,), torch.zeros(16, dtype=torch.int32), True) == set()


def test_launches_are_ordered():
    data = torch.zeros(1, dtype=torch.int32)
    with RaceDetector() as detector:
        _write_across[(1,)](data, False)
        _write_across[(1,)](data, True)
    assert not detector.races


def barriers_in_source():
    for path in sorted(Path(kernels.__file__).parent.glob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"^\s*tl\.debug_barrier\(\)", line):
                yield f"{path.name}:{number}"


@pytest.mark.parametrize("place", list(barriers_in_source()))
def test_every_barrier_of_the_kernels_is_needed(place):
    with RaceDetector(without=frozenset([place])) as detector:
        world = World(
            top_k=33, hot_rows=66, query_rows=3, requests=1, pages=13, overflow_rows=99
        )
        stream(world, 3, keep=0.9, residency=(0.1, 0.2))
        stream(world, 3, keep=0.9, residency=(0.1, 0.2), lru_tile=16)
        reset_rows(torch.tensor([0, 1], dtype=torch.int32), *world.state)
        marks = torch.ones((1, 13), dtype=torch.int8)
        i32 = dict(dtype=torch.int32)
        list_pages(
            torch.tensor([world.state_of[0]], **i32),
            torch.full((4,), 13, **i32),
            world.host_table(),
            marks,
            torch.zeros((1, 13), **i32),
            torch.zeros((1, 13), **i32),
            torch.zeros(1, **i32),
            tile=8,
        )
    assert place in detector.barriers, "the barrier was not reached"
    assert detector.races
