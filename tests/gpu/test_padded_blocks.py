# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Attention and logits kernels take views with a padded block stride (D27, trap 8).

Everything rests on it: a layer is a view of the pool with 209,920 bytes from block to
block, and rows lie beyond 2**32 bytes. Each library's kernel runs over such a view and
over a dense copy, called as the release calls it; both results must be the same bits.
Without a GPU, stand-ins show that the calls are right.
"""

from importlib import import_module
from typing import Any

import pytest
import torch

import stand_ins
from padded_pools import (
    BLOCK_SIZE,
    LATENT,
    NAN,
    WIDTH,
    PaddedPool,
    attention,
    difference,
)
from under_test import DEVICE, ON_GPU, needs_gpu, needs_memory

# At 192 values of a head before absorption, as the models scale it.
SCALE = 192**-0.5
PAGES, TOP_K, HEADS = 40, 2048, 64


def pool_of(kind: str) -> PaddedPool:
    """A pool of more than 2**32 bytes, or a small one where no kernel will see it."""
    if not ON_GPU:
        return PaddedPool(kind, 50, 40, DEVICE)
    needs_memory(24 << 30)
    return PaddedPool(kind, 24_000, PAGES, DEVICE)


def queries(tokens: int, heads: int = HEADS, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(tokens, heads, width, generator=generator)
    return q.bfloat16().to(DEVICE)


def check(
    padded: torch.Tensor, dense: torch.Tensor, want: torch.Tensor, limit: float = 1e-3
) -> None:
    """The same bits from both, no NaN, and nearly what the formula says."""
    assert not padded.isnan().any(), "read what is not the layer's"
    assert torch.equal(padded, dense), difference(padded, dense)
    assert difference(padded, want) < limit


@pytest.mark.parametrize("kind", ["fp8_ds_mla", "bf16", "fp8"])
def test_ids_of_the_padded_view_name_the_rows_of_the_dense_copy(kind) -> None:
    """The check itself: rows by id, and not one row off."""
    pool = pool_of(kind)
    page, offset, _ = pool.pick(2, 300, holes=True)
    flat_stride = pool.kind.block_bytes // pool.kind.row_bytes
    ids = pool.flat_ids(page, offset, flat_stride, padded=True).long()
    size = pool.kind.dtype.itemsize
    width = pool.kind.row_bytes // size
    start = pool.padded.storage_offset()
    flat = pool.slab.view(pool.kind.dtype).flatten()[start:].unfold(0, width, width)
    there = page >= 0
    got = flat[ids[there.to(DEVICE)]].contiguous().view(torch.uint8).cpu()
    want = pool.dense.cpu()[page[there].long(), offset[there].long()]
    assert torch.equal(got, want.contiguous().view(torch.uint8))
    rows = pool.values(page, offset)
    out = attention(queries(2), rows, page, SCALE)
    assert out.shape == (2, HEADS, LATENT) and not out.isnan().any()
    # One row further, or behind another page: the outcome differs, or is NaN.
    for wrong in (ids + 1, ids + BLOCK_SIZE):
        got = flat[wrong[there.to(DEVICE)]].contiguous().view(torch.uint8).cpu()
        assert not torch.equal(got, want.contiguous().view(torch.uint8))


def library(name: str) -> Any:
    """A module with kernels; skips where it is not there."""
    try:
        return import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported: {error}")


# What the names of tests say that ran.
BY = ["library" if ON_GPU else "stand-in"]


@pytest.fixture(params=BY)
def flashmla():
    if not ON_GPU:
        return stand_ins.flashmla
    module = library("vllm.v1.attention.ops.flashmla")
    is_there, reason = module.is_flashmla_sparse_supported()
    if not is_there:
        pytest.skip(f"FlashMLA: {reason}")
    return module


@pytest.fixture(params=BY)
def flash_attention():
    if not ON_GPU:
        return stand_ins.flash_attention
    module = library("vllm.vllm_flash_attn.flash_attn_interface")
    if not module.is_fa_version_supported(3):
        pytest.skip(f"FlashAttention 3: {module.fa_version_unsupported_reason(3)}")
    return module


@pytest.fixture(params=BY)
def flashinfer():
    if not ON_GPU:
        return stand_ins.flashinfer
    if torch.cuda.get_device_capability(DEVICE)[0] != 10:
        pytest.skip("FlashInfer's sparse MLA kernel needs compute capability 10.x")
    return library("flashinfer.decode")


@pytest.fixture(params=BY)
def deep_gemm():
    if not ON_GPU:
        return stand_ins.deep_gemm
    module = library("vllm.utils.deep_gemm")
    if not module.is_deep_gemm_supported():
        pytest.skip("DeepGEMM is not there, or not for this GPU")
    return module


def flat_kv_row_view(view: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The release's flat view of a layer's rows, and rows from block to block."""
    utils = library("vllm.v1.attention.backends.mla.sparse_utils")
    return utils.flat_kv_row_view(view, BLOCK_SIZE)


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (2, 2)])
def test_flashmla_fp8_reads_slots_of_padded_blocks(flashmla, shape) -> None:
    pool = pool_of("fp8_ds_mla")
    batch, length = shape
    q = queries(batch * length)
    page, offset, _ = pool.pick(len(q), TOP_K, holes=True)

    def run(view: torch.Tensor, padded: bool) -> torch.Tensor:
        # This kernel numbers rows by 64 in every block, whatever the stride.
        ids = pool.flat_ids(page, offset, BLOCK_SIZE, padded)
        out, _ = flashmla.flash_mla_with_kvcache(
            q=q.view(batch, length, HEADS, WIDTH),
            k_cache=view.view(torch.uint8).unsqueeze(-2),
            block_table=torch.zeros(batch, 1, dtype=torch.int32, device=DEVICE),
            head_dim_v=LATENT,
            cache_seqlens=torch.full((batch,), 1 << 20, dtype=torch.int32).to(DEVICE),
            tile_scheduler_metadata=flashmla.get_mla_metadata()[0],
            is_fp8_kvcache=True,
            indices=ids.view(batch, length, TOP_K),
            softmax_scale=SCALE,
        )
        return out.reshape(-1, HEADS, LATENT)

    want = attention(q, pool.values(page, offset), page, SCALE)
    check(run(pool.padded, True), run(pool.dense, False), want)


def test_flashmla_bf16_reads_flat_rows_of_padded_blocks(flashmla) -> None:
    pool = pool_of("bf16")
    # Hopper's kernel takes multiples of 64 heads, Blackwell's of 128.
    is_blackwell = ON_GPU and torch.cuda.get_device_capability(DEVICE)[0] == 10
    q = queries(4, heads=128 if is_blackwell else 64)
    page, offset, count = pool.pick(len(q), TOP_K, holes=False)

    def run(view: torch.Tensor, padded: bool) -> torch.Tensor:
        rows, stride = flat_kv_row_view(view)
        ids = pool.flat_ids(page, offset, stride, padded)
        out, _, _ = flashmla.flash_mla_sparse_fwd(
            q,
            rows.view(-1, 1, WIDTH),
            ids.view(len(q), 1, TOP_K),
            SCALE,
            topk_length=count.to(DEVICE),
        )
        return out

    want = attention(q, pool.values(page, offset), page, SCALE)
    check(run(pool.padded, True), run(pool.dense, False), want)


def test_flash_attention_reads_flat_rows_of_padded_blocks(flash_attention) -> None:
    pool = pool_of("bf16")
    q = queries(4, heads=16)
    page, offset, count = pool.pick(len(q), TOP_K, holes=False)

    def run(view: torch.Tensor, padded: bool) -> torch.Tensor:
        rows, stride = flat_kv_row_view(view)
        starts = torch.arange(len(q) + 1, dtype=torch.int32, device=DEVICE)
        return flash_attention.flash_attn_varlen_func(
            q=q[..., LATENT:].contiguous(),
            k=rows[:, LATENT:].unsqueeze(1).unsqueeze(1),
            v=rows[:, :LATENT].unsqueeze(1).unsqueeze(1),
            q_v=q[..., :LATENT].contiguous(),
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=TOP_K,
            seqused_k=count.to(DEVICE),
            block_table=pool.flat_ids(page, offset, stride, padded),
            softmax_scale=SCALE,
            causal=True,
            fa_version=3,
        )

    want = attention(q, pool.values(page, offset), page, SCALE)
    check(run(pool.padded, True), run(pool.dense, False), want)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_flashinfer_reads_flat_rows_of_padded_blocks(flashinfer, kind) -> None:
    pool = pool_of(kind)
    q = queries(4).to(pool.kind.dtype)
    page, offset, count = pool.pick(len(q), TOP_K, holes=False)
    workspace = torch.zeros(394 << 20, dtype=torch.int8, device=DEVICE)

    def run(view: torch.Tensor, padded: bool) -> torch.Tensor:
        _, stride = flat_kv_row_view(view)
        ids = pool.flat_ids(page, offset, stride, padded)
        out = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
            query=q.unsqueeze(1),
            kv_cache=view.unsqueeze(1),
            workspace_buffer=workspace,
            qk_nope_head_dim=128,
            kv_lora_rank=LATENT,
            qk_rope_head_dim=WIDTH - LATENT,
            block_tables=ids.unsqueeze(1),
            seq_lens=count.to(DEVICE),
            max_seq_len=TOP_K,
            bmm1_scale=SCALE,
            bmm2_scale=1.0,
            sparse_mla_top_k=TOP_K,
            return_lse=False,
        )
        return out.view(-1, HEADS, LATENT)

    want = attention(q, pool.values(page, offset), page, SCALE)
    # With an fp8 query its kernel rounds the weights to fp8, too.
    limit = 5e-3 if kind == "fp8" else 1e-3
    check(run(pool.padded, True), run(pool.dense, False), want, limit)


# The indexer --------------------------------------------------------------------


@pytest.mark.parametrize("batch, rows", [(4, 1), (2, 2), (2, 4)])
def test_deep_gemm_scores_keys_of_padded_blocks(deep_gemm, batch, rows) -> None:
    if not deep_gemm.native_next_n_supported(rows):
        pytest.skip(f"DeepGEMM has no kernel for {rows} query rows on this GPU")
    pool, heads, limit = pool_of("indexer"), 32, 4096
    q = queries(batch * rows, heads, 128).to(torch.float8_e4m3fn)
    weights = torch.randn(batch * rows, heads).to(DEVICE)
    share = PAGES // batch
    tables = torch.arange(batch * share, dtype=torch.int32).view(batch, share)
    ends = torch.tensor([share * BLOCK_SIZE - 7 * b for b in range(batch)])
    lens = (ends[:, None] - rows + 1 + torch.arange(rows)).int().to(DEVICE)

    def run(view: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        logits = deep_gemm.fp8_fp4_paged_mqa_logits(
            (q.view(batch, rows, heads, 128), None),
            view.unsqueeze(-2),
            weights,
            lens,
            table.to(DEVICE),
            deep_gemm.get_paged_mqa_logits_metadata(
                lens, BLOCK_SIZE, deep_gemm.get_num_sms()
            ),
            max_model_len=limit,
            clean_logits=False,
        )
        # Behind a row's last key stands anything.
        behind = torch.arange(limit, device=DEVICE) >= lens.view(-1, 1)
        return logits.masked_fill(behind, 0.0)[:, : share * BLOCK_SIZE]

    pages = pool.dense.view(len(pool.dense), -1).cpu()
    values = pages[:, : BLOCK_SIZE * 128].contiguous().view(torch.float8_e4m3fn)
    scales = pages[:, BLOCK_SIZE * 128 :].contiguous().view(torch.float32)
    keys = values.float().view(-1, 128) * scales.view(-1, 1)
    keys = keys[: batch * share * BLOCK_SIZE].view(batch, share * BLOCK_SIZE, 128)
    keys = keys.repeat_interleave(rows, 0)
    scores = torch.einsum("thd,tkd->thk", q.float().cpu(), keys).relu()
    want = (scores * weights.cpu().unsqueeze(-1)).sum(1)
    behind = torch.arange(share * BLOCK_SIZE) >= lens.cpu().view(-1, 1)
    padded = run(pool.padded, pool.blocks[tables.long()])
    check(padded, run(pool.dense, tables), want.masked_fill(behind, 0.0))


def cache_ops() -> Any:
    """vLLM's operators on KV caches."""
    ops = library("vllm._custom_ops")
    if not hasattr(torch.ops._C_cache_ops, "indexer_k_quant_and_cache"):
        pytest.skip("this vLLM has no cache operators for CUDA")
    return ops


def slots_of(pool: PaddedPool, padded: bool) -> torch.Tensor:
    """A slot of every page, int64."""
    page = torch.arange(len(pool.blocks))
    ids = (pool.blocks.long() if padded else page) * BLOCK_SIZE
    return (ids + page * 7 % BLOCK_SIZE).to(DEVICE)


@needs_gpu
def test_indexer_keys_are_written_to_and_gathered_from_padded_blocks() -> None:
    ops, pool = cache_ops(), pool_of("indexer")
    before = pool.padded[pool.blocks.long().to(DEVICE)].clone()
    keys = torch.randn(PAGES, 128).bfloat16().to(DEVICE)
    table = torch.arange(PAGES, dtype=torch.int32).view(1, -1)
    ends = torch.tensor([0, PAGES * BLOCK_SIZE], dtype=torch.int32, device=DEVICE)
    gathered = []
    for view, padded in ((pool.padded, True), (pool.dense, False)):
        slots = slots_of(pool, padded)
        ops.indexer_k_quant_and_cache(keys, view, slots, 128, "ue8m0")
        values = torch.zeros(PAGES * BLOCK_SIZE, 128, dtype=torch.uint8, device=DEVICE)
        values = values.view(torch.float8_e4m3fn)
        scales = torch.zeros(PAGES * BLOCK_SIZE, 4, dtype=torch.uint8, device=DEVICE)
        blocks = pool.blocks.view(1, -1) if padded else table
        ops.cp_gather_indexer_k_quant_cache(
            view, values, scales, blocks.to(DEVICE), ends
        )
        gathered.append((values.view(torch.uint8), scales))
    after = pool.padded[pool.blocks.long().to(DEVICE)]
    assert torch.equal(after, pool.dense) and not torch.equal(after, before)
    for mine, theirs in zip(*gathered):
        assert torch.equal(mine, theirs) and mine.any()
    pool.slab[pool.blocks.long().to(DEVICE)] = NAN
    assert (pool.slab[1:] == NAN).all(), "wrote into a block that has no page"


@needs_gpu
@pytest.mark.parametrize("kind, name", [("fp8_ds_mla", "fp8_ds_mla"), ("bf16", "auto")])
def test_latents_are_written_to_padded_blocks(kind, name) -> None:
    ops, pool = cache_ops(), pool_of(kind)
    latents = torch.randn(PAGES, LATENT).bfloat16().to(DEVICE)
    ropes = torch.randn(PAGES, WIDTH - LATENT).bfloat16().to(DEVICE)
    scale = torch.ones((), dtype=torch.float32, device=DEVICE)
    before = pool.dense.clone()
    for view, padded in ((pool.padded, True), (pool.dense, False)):
        slots = slots_of(pool, padded)
        ops.concat_and_cache_mla(latents, ropes, view, slots, name, scale)
    after = pool.padded[pool.blocks.long().to(DEVICE)]
    assert torch.equal(after.view(torch.uint8), pool.dense.view(torch.uint8))
    assert not torch.equal(before.view(torch.uint8), pool.dense.view(torch.uint8))
