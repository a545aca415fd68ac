# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Thousands of random steps against an OrderedDict: the only proof about order."""

import os

import pytest

from device_world import DeviceWorld

STEPS = int(os.environ.get("HISPARSE_STREAM_STEPS", "0"))
SIZES = [
    dict(query_rows=1, top_k=16, hot_rows=16),
    dict(query_rows=2, top_k=33, hot_rows=66, requests=4),
    dict(query_rows=4, top_k=64, hot_rows=128, block_size=64, row_bytes=656),
    # Programs as large as in production; a few steps of it are slow in Python alone.
    dict(query_rows=4, top_k=2048, hot_rows=4096, requests=2, pages=300, block_size=64),
]


@pytest.mark.parametrize("case", range(len(SIZES)))
@pytest.mark.parametrize("seed", [0, 1])
def test_a_long_random_stream_is_an_exact_lru(device, case, seed) -> None:
    on_cpu = device.type == "cpu"
    is_large = SIZES[case]["top_k"] > 1024
    if on_cpu and (is_large or seed):
        pytest.skip("the interpreter runs production sizes in tests/kernels")
    steps = STEPS or (12 if on_cpu else 100 if is_large else 2000)
    world = DeviceWorld(device, seed=seed, **SIZES[case])
    last = [world.draw() for _ in range(world.requests)]
    for step in range(steps):
        if step % 4 == 0:
            world.set_residency(float(world.rng.choice([0.0, 0.2, 0.5, 0.9])))
        some = 1 + world.rng.integers(world.requests)
        batch = world.rng.permutation(world.requests)[:some].tolist()
        rows_of = []
        for request in batch:
            rows = []
            for _ in range(1 + world.rng.integers(world.query_rows)):
                last[request] = world.draw(last[request], keep=0.7)
                rows.append(last[request])
            rows_of.append(rows)
        world.set_batch(batch, rows_of)
        world.launch()
        world.check(batch, rows_of)
    hits, misses = world.counters.sum(0)[:2].tolist()
    assert hits > 0 and misses > 0
