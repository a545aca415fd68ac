# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Libraries' kernels in torch, by their own conventions, where there is no GPU.

They show that the tests call what they call with the right shapes and ids. What the
libraries themselves do is for a GPU to show.
"""

from types import SimpleNamespace

import torch

from padded_pools import KINDS, LATENT, attention, values_of


def _attend(
    q: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, scale: float
) -> torch.Tensor:
    kinds = {kind.dtype: kind for name, kind in KINDS.items() if name != "indexer"}
    values = values_of(rows, kinds[rows.dtype])
    values = values.masked_fill((ids < 0).unsqueeze(-1), 0.0)
    return attention(q, values, ids, scale)


def _flash_mla_with_kvcache(
    *, q, k_cache, block_table, head_dim_v, cache_seqlens, tile_scheduler_metadata,
    is_fp8_kvcache, indices, softmax_scale,
):  # fmt: skip
    assert is_fp8_kvcache and head_dim_v == LATENT and k_cache.shape[1:3] == (64, 1)
    assert block_table.shape[0] == cache_seqlens.shape[0] == q.shape[0]
    ids, safe = indices.flatten(0, 1), indices.flatten(0, 1).long().clamp(min=0)
    rows = k_cache[safe // 64, safe % 64, 0]
    out = _attend(q.flatten(0, 1), rows, ids, softmax_scale)
    return out.view(*q.shape[:3], LATENT), None


def _flash_mla_sparse_fwd(q, kv, indices, scale, topk_length):
    ids = indices.squeeze(1)
    assert torch.equal((ids >= 0).sum(1).int(), topk_length)
    rows = kv.squeeze(1)[ids.long().clamp(min=0)]
    return _attend(q, rows, ids, scale), None, None


flashmla = SimpleNamespace(
    flash_mla_with_kvcache=_flash_mla_with_kvcache,
    flash_mla_sparse_fwd=_flash_mla_sparse_fwd,
    get_mla_metadata=lambda: (None, None),
)


def _flash_attn_varlen_func(
    *, q, k, v, q_v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, block_table,
    softmax_scale, causal, fa_version,
):  # fmt: skip
    assert (max_seqlen_q, fa_version, causal) == (1, 3, True)
    assert len(cu_seqlens_q) == len(q) + 1 and max_seqlen_k == block_table.shape[1]
    counted = torch.arange(max_seqlen_k) < seqused_k.unsqueeze(1)
    ids = block_table.masked_fill(~counted, -1)
    safe = ids.long().clamp(min=0)
    rows = torch.cat([v[safe, 0, 0], k[safe, 0, 0]], -1)
    return _attend(torch.cat([q_v, q], -1), rows, ids, softmax_scale)


flash_attention = SimpleNamespace(flash_attn_varlen_func=_flash_attn_varlen_func)


def _trtllm_batch_decode_with_kv_cache_mla(
    *, query, kv_cache, block_tables, seq_lens, bmm1_scale, bmm2_scale, max_seq_len,
    sparse_mla_top_k, **_,
):  # fmt: skip
    assert max_seq_len == sparse_mla_top_k == block_tables.shape[-1]
    view = kv_cache.squeeze(1)
    width = view.shape[-1]
    flat = view.as_strided(
        ((len(view) - 1) * (view.stride(0) // width) + 64, width), (width, 1)
    )
    counted = torch.arange(max_seq_len) < seq_lens.unsqueeze(1)
    ids = block_tables.squeeze(1).masked_fill(~counted, -1)
    rows = flat[ids.long().clamp(min=0)]
    return _attend(query.squeeze(1), rows, ids, bmm1_scale) * bmm2_scale


flashinfer = SimpleNamespace(
    trtllm_batch_decode_with_kv_cache_mla=_trtllm_batch_decode_with_kv_cache_mla
)


def _fp8_fp4_paged_mqa_logits(
    q, kv_cache, weights, context_lens, block_tables, schedule, *, max_model_len,
    clean_logits,
):  # fmt: skip
    assert kv_cache.shape[1:] == (64, 1, 132) and schedule == "schedule"
    batch, rows, heads, width = q[0].shape
    pages = kv_cache[block_tables.long()].flatten(2)
    keys = pages[..., : 64 * width].contiguous().view(torch.float8_e4m3fn).float()
    scales = pages[..., 64 * width :].contiguous().view(torch.float32)
    keys = keys.view(batch, -1, width) * scales.reshape(batch, -1, 1)
    scores = torch.einsum("brhd,bkd->brhk", q[0].float(), keys).relu()
    own = (scores * weights.view(batch, rows, heads, 1)).sum(2).flatten(0, 1)
    logits = torch.full((batch * rows, max_model_len), float("nan"))
    logits[:, : own.shape[1]] = own
    behind = torch.arange(max_model_len) >= context_lens.view(-1, 1)
    return logits.masked_fill(behind, float("nan"))


deep_gemm = SimpleNamespace(
    native_next_n_supported=lambda rows: True,
    get_num_sms=lambda: 132,
    get_paged_mqa_logits_metadata=lambda lens, size, sms: "schedule",
    fp8_fp4_paged_mqa_logits=_fp8_fp4_paged_mqa_logits,
)
