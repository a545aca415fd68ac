# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The start-up line (D32). Standard library only."""

from .capacity import PoolPlan
from .settings import GIB


def startup_line(pools: PoolPlan, num_ranks: int = 1) -> str:
    """What the server has room for, in one line.

    Args:
        pools: the plan that every rank runs with.
        num_ranks: tensor-parallel ranks.
    """
    device = pools.device
    tokens = pools.limits.max_model_len
    shared = ", shared by the ranks of a node," if num_ranks > 1 else ""
    return (
        f"HiSparse: device pool {_gib(pools.device_bytes)} "
        f"({pools.num_blocks:,} blocks of {device.block_bytes:,} B, "
        f"{device.num_stacks} stacks of {device.layers_per_stack} layers) holds "
        f"{pools.device_tokens:,} resident tokens of {device.resident_token_bytes:,.0f}"
        f" B (ideal {device.ideal_token_bytes:,} B); "
        f"host pool {_gib(pools.host_bytes)}{shared} "
        f"holds {pools.host_tokens:,} tokens of "
        f"{device.ideal_token_bytes:,} B; "
        f"hot lease {pools.lease_blocks:,} blocks, "
        f"{_mib(pools.lease_blocks * device.block_bytes)} "
        f"({pools.hot.hot_rows:,} hot + {pools.hot.overflow_rows:,} overflow rows), "
        f"{pools.mixed_rows} at once; "
        f"bookkeeping {_mib(pools.bookkeeping_bytes)}; "
        f"steady-state concurrency at {tokens:,} tokens per request: "
        f"{pools.steady_concurrency(tokens):.1f}x on the device "
        f"({pools.admission_concurrency(tokens):.1f}x while "
        f"{pools.limits.window_tokens:,} prompt tokens are in flight), "
        f"{pools.host_tokens / tokens:.1f}x on the host"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
