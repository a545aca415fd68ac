# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""How launchers cut their work into programs.

The GPU wants many programs of one query token each. Triton's interpreter pays per
program and per operation, hardly per element, so there one program takes as many
tokens as a tensor may have elements for.
"""

import torch
import triton

# Half a million elements: half of what Triton allows in one tensor.
_MAX_ELEMENTS = 1 << 19


def entry_tile(device: torch.device, top_k: int, tile: int | None) -> int:
    """Top-k entries per program: as asked for, else 512 on a GPU, a row on the CPU."""
    whole_row = triton.next_power_of_2(top_k)
    if tile is not None:
        return tile
    return whole_row if device.type == "cpu" else min(whole_row, 512)


def token_tile(
    device: torch.device, num_tokens: int, tile: int, tokens: int | None
) -> int:
    """Query tokens per program: as asked for, else 1 on a GPU, many on the CPU."""
    if tokens is not None:
        return tokens
    if device.type != "cpu":
        return 1
    return min(triton.next_power_of_2(num_tokens), max(1, _MAX_ELEMENTS // tile))


def row_warps(tile: int) -> int:
    """Warps for a program of this many entries, 4 entries a lane.

    4 a lane: 48 registers and no spill (sm_90, `lookup` compiled at K = 2048).
    """
    return min(16, max(4, tile // 128))
