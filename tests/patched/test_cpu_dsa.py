# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The CPU's DSA operators against their definitions, byte for byte where bytes move."""

import itertools

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    per_token_group_quant_fp8,
)
from vllm.utils.deep_gemm import fp8_fp4_mqa_logits, fp8_fp4_paged_mqa_logits
from vllm.v1.attention.backends.mla import sparse_utils
from vllm.v1.attention.ops import cpu_dsa_latents

HEAD_DIM = 128
ROW = HEAD_DIM + 4
FP8 = torch.float8_e4m3fn


def padded_cache(blocks: int, block_size: int, row: int, dtype=torch.uint8):
    """A cache whose blocks lie apart, inside a larger buffer, and that buffer."""
    stride = block_size * row + 48
    buffer = torch.zeros(16 + blocks * stride, dtype=dtype)
    view = buffer.as_strided((blocks, block_size, row), (stride, row, 1), 16)
    return view, buffer


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- quantization -----------------------------------------------------------------


def test_ue8m0_scale_is_the_smallest_power_of_two_that_fits() -> None:
    exact = 448.0 * 2.0 ** torch.arange(-8, 8)
    amax = torch.cat([exact, exact.nextafter(torch.tensor(torch.inf))])
    x = torch.zeros(len(amax), HEAD_DIM)
    x[:, 5] = amax
    q, scale = per_token_group_quant_fp8(x, HEAD_DIM, use_ue8m0=True)
    expected = 2.0 ** torch.arange(-8, 8)
    assert torch.equal(scale[:, 0], torch.cat([expected, 2 * expected]))
    assert torch.equal(q.float()[:16, 5], torch.full((16,), 448.0))


def test_quantized_values_are_within_half_a_step() -> None:
    x = random(7, 2 * HEAD_DIM) * 3
    q, scale = per_token_group_quant_fp8(x, HEAD_DIM, use_ue8m0=False)
    assert q.shape == x.shape and scale.shape == (7, 2)
    back = q.float().unflatten(-1, (2, -1)) * scale[..., None]
    error = (back.flatten(-2) - x).abs()
    # Three mantissa bits; the last term is the step of subnormal values.
    bound = x.abs() / 16 + scale.repeat_interleave(HEAD_DIM, 1) * 2**-10
    assert (error <= bound).all()


# --- indexer cache ----------------------------------------------------------------


def test_indexer_page_holds_values_then_scales_and_nothing_else_changes() -> None:
    block_size = 16
    cache, buffer = padded_cache(4, block_size, ROW)
    k = random(3, HEAD_DIM)
    slots = torch.tensor([2 * block_size + 5, -1, 0])
    ops.indexer_k_quant_and_cache(k, cache, slots, HEAD_DIM, "ue8m0")

    q, scale = per_token_group_quant_fp8(k, HEAD_DIM, use_ue8m0=True)
    expected = torch.zeros_like(buffer)
    for token, block, offset in ((0, 2, 5), (2, 0, 0)):
        page = 16 + block * cache.stride(0)
        value = page + offset * HEAD_DIM
        expected[value : value + HEAD_DIM] = q[token].view(torch.uint8)
        at = page + block_size * HEAD_DIM + 4 * offset
        expected[at : at + 4] = scale[token].view(torch.uint8)
    assert torch.equal(buffer, expected)


def test_step_without_slots_writes_nothing() -> None:
    """Dummy steps and padding have no slots."""
    cache, buffer = padded_cache(2, 16, ROW)
    for tokens in (0, 2):
        slots = torch.full((tokens,), -1)
        k = random(tokens, HEAD_DIM)
        ops.indexer_k_quant_and_cache(k, cache, slots, HEAD_DIM, "ue8m0")
        latents = torch.zeros(2, 16, 656, dtype=torch.uint8)
        ops.concat_and_cache_mla(
            random(tokens, 512),
            random(tokens, 64),
            latents,
            slots,
            "fp8_ds_mla",
            torch.tensor(1.0),
        )
        assert not buffer.any() and not latents.any()


@pytest.mark.parametrize("block_size", [16, 64])
def test_gathered_keys_are_those_written(block_size: int) -> None:
    lengths = [1, block_size, 2 * block_size + 3]
    cache, _ = padded_cache(8, block_size, ROW)
    tables = torch.tensor([[7, 0, 0], [3, 0, 0], [1, 6, 2]], dtype=torch.int32)
    keys = [random(n, HEAD_DIM, seed=n) for n in lengths]
    for table, k in zip(tables, keys):
        position = torch.arange(len(k))
        slots = table[position // block_size].long() * block_size
        slots += position % block_size
        ops.indexer_k_quant_and_cache(k, cache, slots, HEAD_DIM, "ue8m0")

    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    total = sum(lengths)
    dst_k = torch.zeros(total + 5, HEAD_DIM, dtype=torch.uint8).view(FP8)
    dst_scale = torch.zeros(total + 5, 4, dtype=torch.uint8)
    ops.cp_gather_indexer_k_quant_cache(cache, dst_k, dst_scale, tables, bounds)
    q, scale = per_token_group_quant_fp8(torch.cat(keys), HEAD_DIM, use_ue8m0=True)
    assert torch.equal(dst_k[:total].float(), q.float())
    assert torch.equal(dst_scale[:total].view(torch.float32), scale)
    assert not dst_scale[total:].any()


# --- scores and selection ---------------------------------------------------------


@pytest.fixture
def scoring():
    """Queries, keys, their scales and head weights."""
    q = random(5, 4, HEAD_DIM).to(FP8)
    k, scale = per_token_group_quant_fp8(
        random(41, HEAD_DIM, seed=1), HEAD_DIM, use_ue8m0=True
    )
    return q, k, scale[:, 0].contiguous(), random(5, 4, seed=2)


def prefill_logits(q, k, scale, weights, clean: bool = False) -> torch.Tensor:
    starts = torch.zeros(len(q), dtype=torch.int32)
    ends = torch.full((len(q),), len(k), dtype=torch.int32)
    return fp8_fp4_mqa_logits((q, None), (k, scale), weights, starts, ends, clean)


def test_scores_follow_the_definition(scoring) -> None:
    q, k, scale, weights = scoring
    dots = torch.einsum("mhd,nd->mhn", q.double(), k.double()) * scale.double()
    expected = (dots.relu() * weights.double()[..., None]).sum(dim=1)
    torch.testing.assert_close(
        prefill_logits(*scoring).double(), expected, atol=1e-5, rtol=1e-5
    )


def test_scores_do_not_depend_on_the_batch(scoring) -> None:
    q, k, scale, weights = scoring
    together = prefill_logits(*scoring)
    for row in range(len(q)):
        alone = prefill_logits(q[row : row + 1], k, scale, weights[row : row + 1])
        assert torch.equal(alone[0], together[row])
    fewer_keys = prefill_logits(q, k[:7], scale[:7], weights)
    assert torch.equal(fewer_keys, together[:, :7])


def test_scores_outside_a_row_are_cleaned_on_request(scoring) -> None:
    q, k, scale, weights = scoring
    starts = torch.tensor([0, 3, 5, 0, 0], dtype=torch.int32)
    ends = torch.tensor([41, 4, 9, 0, 1], dtype=torch.int32)
    logits = fp8_fp4_mqa_logits((q, None), (k, scale), weights, starts, ends, True)
    column = torch.arange(41)
    inside = (column >= starts[:, None]) & (column < ends[:, None])
    assert torch.equal(logits.isfinite(), inside)


@pytest.mark.parametrize("next_n", [1, 2])
def test_paged_scores_equal_prefill_scores(next_n: int) -> None:
    block_size, batch = 16, 3
    cache, _ = padded_cache(8, block_size, ROW)
    tables = torch.tensor([[7, 4], [3, 0], [1, 6]], dtype=torch.int32)
    lengths = torch.tensor([20, 0, 32], dtype=torch.int32)
    ends = lengths[:, None] - next_n + 1 + torch.arange(next_n, dtype=torch.int32)
    q = random(batch, next_n, 4, HEAD_DIM).to(FP8)
    weights = random(batch * next_n, 4, seed=3)
    keys = {}
    for request, length in enumerate(lengths.tolist()):
        keys[request] = random(length, HEAD_DIM, seed=request)
        position = torch.arange(length)
        slots = tables[request][position // block_size].long() * block_size
        slots += position % block_size
        ops.indexer_k_quant_and_cache(keys[request], cache, slots, HEAD_DIM, "ue8m0")
    logits = fp8_fp4_paged_mqa_logits(
        (q, None),
        cache.unsqueeze(2),
        weights,
        ends,
        tables,
        torch.empty(0),
        max_model_len=64,
        clean_logits=False,
    )
    assert logits.shape == (batch * next_n, 64)
    for request in (0, 2):
        k, scale = per_token_group_quant_fp8(keys[request], HEAD_DIM, use_ue8m0=True)
        rows = slice(request * next_n, (request + 1) * next_n)
        expected = prefill_logits(q[request], k, scale[:, 0], weights[rows])
        assert torch.equal(logits[rows, : len(k)], expected)


@pytest.mark.parametrize("top_k", [1, 32, 33, 64])
def test_prefill_selects_the_best_relative_to_the_row_start(top_k: int) -> None:
    logits = random(4, 80)
    starts = torch.tensor([0, 10, 40, 7], dtype=torch.int32)
    ends = torch.tensor([80, 42, 41, 7], dtype=torch.int32)
    indices = torch.full((4, top_k), 99, dtype=torch.int32)
    ops.top_k_per_row_prefill(logits, starts, ends, indices, 4, 80, 1, top_k)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist())):
        scores = logits[row, start:end].tolist()
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[:top_k]
        got = indices[row].tolist()
        assert sorted(got[: len(best)]) == sorted(best)
        assert got[len(best) :] == [-1] * (top_k - len(best))


def test_ties_go_to_the_lower_position() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    indices = torch.empty(1, 2, dtype=torch.int32)
    bounds = torch.tensor([0], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    ops.top_k_per_row_prefill(logits, *bounds, indices, 1, 5, 1, 2)
    assert indices.tolist() == [[1, 2]]


@pytest.mark.parametrize("two_dimensional", [True, False])
def test_decode_rows_end_where_their_token_stands(two_dimensional: bool) -> None:
    logits = torch.arange(4 * 10).reshape(4, 10).float()
    seq_lens = torch.tensor([10, 1], dtype=torch.int32)
    if two_dimensional:
        seq_lens = torch.tensor([[9, 10], [0, 1]], dtype=torch.int32)
    indices = torch.empty(4, 3, dtype=torch.int32)
    ops.top_k_per_row_decode(logits, 2, seq_lens, indices, 4, 10, 1, 3)
    assert indices.tolist() == [[8, 7, 6], [9, 8, 7], [-1, -1, -1], [0, -1, -1]]


# --- latent cache -----------------------------------------------------------------


def test_ds_mla_row_layout() -> None:
    kv_c, k_pe = random(3, 512), random(3, 64, seed=1).bfloat16().float()
    kv_c[1, 128:256] = 0
    rows = cpu_dsa_latents.pack_ds_mla_rows(kv_c, k_pe)
    assert rows.shape == (3, 656)
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    amax = kv_c.unflatten(1, (4, 128)).abs().amax(-1)
    assert torch.equal(scales, (amax / 448).clamp(min=torch.finfo(torch.float32).tiny))
    assert torch.equal(rows[:, 528:].contiguous().view(torch.bfloat16).float(), k_pe)
    back = cpu_dsa_latents.unpack_ds_mla_rows(rows)
    assert torch.equal(back[:, 512:], k_pe)
    assert torch.equal(back[1, 128:256], torch.zeros(128))
    step = scales.repeat_interleave(128, 1) * 2**-10
    assert ((back[:, :512] - kv_c).abs() <= kv_c.abs() / 16 + step).all()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_ds_mla"])
def test_latents_go_to_their_slots_only(kv_cache_dtype: str) -> None:
    packed = kv_cache_dtype == "fp8_ds_mla"
    row, dtype = (656, torch.uint8) if packed else (576, torch.bfloat16)
    cache, buffer = padded_cache(4, 16, row, dtype)
    kv_c, k_pe = random(4, 512), random(4, 64, seed=1)
    slots = torch.tensor([33, -1, 7])  # one token of padding without a slot
    ops.concat_and_cache_mla(
        kv_c, k_pe, cache, slots, kv_cache_dtype, torch.tensor(1.0)
    )
    expected = torch.zeros_like(buffer)
    if packed:
        rows = cpu_dsa_latents.pack_ds_mla_rows(kv_c, k_pe)
    else:
        rows = torch.cat([kv_c, k_pe], dim=1).bfloat16()
    for token, block, offset in ((0, 2, 1), (2, 0, 7)):
        start = 16 + block * cache.stride(0) + offset * row
        expected[start : start + row] = rows[token]
    assert torch.equal(buffer, expected)


def test_other_fp8_latents_are_refused() -> None:
    cache = torch.zeros(1, 16, 576, dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match="fp8_ds_mla"):
        ops.concat_and_cache_mla(
            random(1, 512),
            random(1, 64),
            cache,
            torch.tensor([0]),
            "fp8",
            torch.tensor(1.0),
        )


# --- positions to rows ------------------------------------------------------------


def converted_by_kernel(req_id, table, positions, block_size, stride):
    """Run the Triton kernel itself, in the interpreter."""
    out = torch.empty_like(positions)
    counts = torch.empty(len(positions), dtype=torch.int32)
    width = positions.shape[1]
    sparse_utils._convert_req_index_to_global_index_kernel[(len(positions), 1)](
        req_id,
        table,
        positions,
        out,
        counts,
        None,
        None,
        table.shape[1],
        block_size,
        stride,
        width,
        False,
        True,
        True,
        False,
        1,
        0,
        1,
        *table.stride(),
        *positions.stride(),
        *out.stride(),
    )
    return out, counts


@pytest.mark.parametrize("block_size, stride", [(64, 64), (16, 16), (64, 320)])
@pytest.mark.parametrize("width", [1, 32, 64])
def test_conversion_equals_the_kernel(block_size: int, stride: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    table = torch.randint(1, 90_000, (3, 7), generator=generator, dtype=torch.int32)
    req_id = torch.tensor([0, 2, 1, 1, 0], dtype=torch.int32)
    # Padding, the last position of the table and positions beyond it.
    positions = torch.randint(
        -1, 8 * block_size, (5, width), generator=generator, dtype=torch.int32
    )
    positions[0, 0], positions[1, -1] = -1, 7 * block_size - 1
    positions[2, 0] = 7 * block_size
    expected = converted_by_kernel(req_id, table, positions, block_size, stride)
    got = sparse_utils.triton_convert_req_index_to_global_index(
        req_id,
        table,
        positions,
        BLOCK_SIZE=block_size,
        BLOCK_STRIDE_ROWS=stride,
        NUM_TOPK_TOKENS=width,
        BLOCK_N=width,
        return_valid_counts=True,
    )
    for actual, want in zip(got, expected, strict=True):
        assert torch.equal(actual, want)
        assert actual.dtype == want.dtype
