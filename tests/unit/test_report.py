# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The start-up line (D32)."""

from hisparse_core.capacity import HotSizes, Limits, plan_pools
from hisparse_core.report import startup_line

from geometry import glm_plan


def test_every_number_of_the_line() -> None:
    plan = plan_pools(
        glm_plan(656),
        HotSizes(topk=2_048, hot_rows=4_096, drafts=3),
        Limits(80_000, max_num_seqs=256, window_tokens=65_536, decode_tokens=11),
        num_blocks=91_047,
        host_bytes=384 << 30,
    )
    assert startup_line(plan) == (
        "HiSparse: device pool 17.80 GiB (91,047 blocks of 209,920 B, 16 stacks of 5 "
        "layers) holds 342,720 resident tokens of 55,760 B (ideal 54,728 B); "
        "host pool 384.00 GiB holds 7,533,824 tokens of 54,728 B; "
        "hot lease 1,088 blocks, 217.8 MiB (4,096 hot + 4,096 overflow rows), "
        "83 at once; bookkeeping 388.9 MiB; "
        "steady-state concurrency at 80,000 tokens per request: "
        "38.4x on the device (31.0x while 65,536 prompt tokens are in flight), "
        "94.2x on the host"
    )
