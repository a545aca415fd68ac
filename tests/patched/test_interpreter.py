# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Triton's interpreter as vLLM's Triton on the CPU platform."""

import os
import subprocess
import sys

import pytest
import torch
from vllm.triton_utils import HAS_TRITON, TRITON_INTERPRETED, tl, tldevice, triton
from vllm.v1.attention.ops.common import pack_seq_triton, unpack_seq_triton
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p


@triton.jit
def _log1p_kernel(x_ptr, out_ptr, n: tl.constexpr):
    offset = tl.arange(0, n)
    tl.store(out_ptr + offset, tldevice.log1p(tl.load(x_ptr + offset)))


def test_triton_counts_as_available() -> None:
    assert TRITON_INTERPRETED
    assert HAS_TRITON


@pytest.mark.parametrize("interpret, expected", [("1", "True"), ("0", "False")])
def test_availability_follows_the_environment(interpret: str, expected: str) -> None:
    code = "from vllm.triton_utils import importing as i; print(i.HAS_TRITON)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": interpret},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split()[-1] == expected


@pytest.mark.parametrize("dtype, ulps", [(torch.float32, 4), (torch.float64, 4)])
def test_log1p_is_accurate_near_zero_and_near_minus_one(dtype, ulps: int) -> None:
    magnitudes = torch.logspace(-15, -0.5, 31, dtype=torch.float64)
    x = torch.cat([magnitudes, -magnitudes, torch.tensor([0.0, 4.0])]).to(dtype)
    out = torch.empty_like(x)
    _log1p_kernel[(1,)](x, out, x.numel())
    expected = torch.log1p(x.double())
    error = (out.double() - expected).abs()
    assert (error <= ulps * torch.finfo(dtype).eps * expected.abs()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_sequences_are_packed_and_unpacked(dtype: torch.dtype) -> None:
    """Decodes of unequal length (a short chunk beside drafts) are padded."""
    lengths = torch.tensor([2, 1, 3], dtype=torch.int32)
    x = torch.arange(1, 6 * 4 * 8 + 1).reshape(6, 4, 8).remainder(64).float().to(dtype)
    packed = pack_seq_triton(x, lengths)
    assert packed.shape == (3, 3, 4, 8)
    rows = [packed[0, 0], packed[0, 1], packed[1, 0], *packed[2]]
    assert torch.equal(torch.stack([r.float() for r in rows]), x.float())
    indices = torch.arange(9, dtype=torch.int32).reshape(3, 3, 1)
    unpacked = unpack_seq_triton(indices, lengths).flatten().tolist()
    assert unpacked == [0, 1, 3, 6, 7, 8]


def test_top_k_keeps_the_k_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]] * 2)
    k = torch.tensor([2, 4], dtype=torch.int32)
    kept = apply_top_k_top_p(logits, k, None).isfinite()
    assert kept.tolist() == [[False, True, False, True], [True] * 4]
