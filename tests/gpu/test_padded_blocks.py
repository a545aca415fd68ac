# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Attention and logits kernels take views with a padded block stride (D27, trap 8).

Everything rests on it: a layer is a view of the pool with 209,920 bytes from block to
block, and rows lie beyond 2**32 bytes. Each library's kernel runs over such a view and
over a dense copy, called as the release calls it; both results must be the same bits.
Without a GPU, stand-ins and the CPU platform's operators show that the calls are right.
What the pool itself does is in `test_padded_pools.py`.
"""

from typing import Any

import pytest
import torch

import stand_ins
from hisparse_tools.library_checks import NOT_THIS_GPU
from libraries import kernels_fixture, library
from padded_pools import (
    BLOCK_SIZE,
    LATENT,
    PAGES,
    WIDTH,
    PaddedPool,
    attention,
    difference,
    pool_of,
)
from under_test import DEVICE, ON_GPU

# At 192 values of a head before absorption, as the models scale it.
SCALE = 192**-0.5
TOP_K, HEADS = 2048, 64


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


flashmla = kernels_fixture(
    stand_ins.flashmla,
    "vllm.v1.attention.ops.flashmla",
    (9, 10),
    lambda module: module.is_flashmla_sparse_supported()[1],
)
flash_attention = kernels_fixture(
    stand_ins.flash_attention,
    "vllm.vllm_flash_attn.flash_attn_interface",
    (9,),
    lambda module: module.fa_version_unsupported_reason(3),
)
flashinfer = kernels_fixture(stand_ins.flashinfer, "flashinfer.decode", (10,))
deep_gemm = kernels_fixture(
    stand_ins.deep_gemm,
    "vllm.utils.deep_gemm",
    (9, 10, 12),
    lambda module: None if module.is_deep_gemm_supported() else "no DeepGEMM",
)


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
        pytest.skip(f"{NOT_THIS_GPU}: DeepGEMM has no kernel for {rows} query rows")
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
    assert pool.stray_bytes() == 0, "wrote what is not the layer's"


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
    assert pool.stray_bytes() == 0, "wrote what is not the layer's"
