# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Rotary embedding on the CPU against its definition."""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

ROPE_DIM = 64
BASE = 10_000.0


def rotated(x: torch.Tensor, positions: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rotate ``[tokens, heads, ROPE_DIM]``, pair by pair, in complex numbers."""
    frequency = BASE ** (-torch.arange(0, ROPE_DIM, 2).double() / ROPE_DIM)
    angle = positions.double()[:, None, None] * frequency
    x = x.double()
    if is_neox:
        first, second = x.chunk(2, dim=-1)
    else:
        first, second = x[..., 0::2], x[..., 1::2]
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    if is_neox:
        return torch.cat([turned.real, turned.imag], dim=-1)
    return torch.stack([turned.real, turned.imag], dim=-1).flatten(-2)


@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("tokens, heads", [(1, 1), (3, 4), (7, 2)])
@torch.inference_mode()
def test_queries_with_heads_turn_by_token_position(
    tokens: int, heads: int, is_neox: bool
) -> None:
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(
            ROPE_DIM,
            max_position=64,
            is_neox_style=is_neox,
            rope_parameters={"rope_type": "default", "rope_theta": BASE},
            dtype=torch.float32,
        )
    generator = torch.Generator().manual_seed(tokens * heads)
    # As the MLA layer calls it: a slice of a wider query, and one key head.
    q = torch.randn(tokens, heads, ROPE_DIM + 32, generator=generator)[..., 32:]
    k = torch.randn(tokens, 1, ROPE_DIM, generator=generator)
    positions = torch.arange(tokens) * 5 + 1
    expected = [rotated(x, positions, is_neox) for x in (q, k)]
    got = rope.forward_cpu(positions, q.clone(), k.clone())
    for actual, want in zip(got, expected, strict=True):
        torch.testing.assert_close(actual.double(), want, atol=1e-5, rtol=0)
