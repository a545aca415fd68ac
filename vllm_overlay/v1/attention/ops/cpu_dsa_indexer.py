# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Torch reference of the DSA indexer's operations, for the CPU platform.

The signatures and the cache layout are those of the compiled CUDA operators and of
DeepGEMM's logits kernels (source: vLLM 0.29.0,
``csrc/libtorch_stable/cache_kernels.cu``, ``utils/deep_gemm.py``). An indexer page
is ``block_size`` x ``head_dim`` fp8 values, *then* ``block_size`` fp32 scales, so
the bytes of one token are not contiguous.

Every result is a function of its own row only, whatever else is in the batch: sums
of products of fp8 values are taken in fp64, where they are exact in any order, and
the rest is element-wise.
"""

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448
PAD_INDEX = -1


def _ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """Round positive fp32 scales up to a power of two.

    ``frexp`` is exact, where ``exp2(ceil(log2(x)))`` depends on the last bit of
    the library's logarithm.
    """
    mantissa, exponent = torch.frexp(scale)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return torch.ldexp(torch.ones_like(scale), exponent)


def to_fp8(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Divide fp32 values by their scale and convert with saturation."""
    return (values / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def per_token_group_fp8_quant(
    input: torch.Tensor,
    output_q: torch.Tensor,
    output_s: torch.Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    scale_ue8m0: bool,
    dummy_is_scale_transposed: bool = False,
    dummy_is_tma_aligned: bool = False,
) -> None:
    """Quantize groups of a row to fp8.

    Args:
        input: ``[..., D]`` float, ``D`` a multiple of `group_size`.
        output_q: ``[..., D]`` fp8, written.
        output_s: ``[..., D / group_size]`` fp32 scales, written. Its strides say
            whether the scales are column-major; the two flags are not needed.
        group_size: Values that share a scale.
        eps: Lower bound of a group's largest magnitude.
        fp8_min: Smallest fp8 value.
        fp8_max: Largest fp8 value.
        scale_ue8m0: Round scales up to a power of two.
    """
    groups = input.float().unflatten(-1, (-1, group_size))
    scale = groups.abs().amax(dim=-1).clamp_(min=eps) / fp8_max
    if scale_ue8m0:
        scale = _ue8m0(scale)
    quantized = (groups / scale.unsqueeze(-1)).clamp_(fp8_min, fp8_max)
    output_q.copy_(quantized.flatten(-2).to(output_q.dtype))
    output_s.copy_(scale)


def _page_views(
    kv_cache: torch.Tensor, head_dim: int, scale_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of an indexer cache as values and scales.

    Args:
        kv_cache: ``[num_blocks, block_size, head_dim + scale_bytes]`` uint8; the
            block stride may exceed the page.
        head_dim: Values of a token.
        scale_bytes: Bytes of a token's scales.

    Returns:
        ``[num_blocks, block_size, head_dim]`` and
        ``[num_blocks, block_size, scale_bytes]`` uint8 views.
    """
    num_blocks, block_size = kv_cache.shape[:2]
    block_stride = kv_cache.stride(0)
    offset = kv_cache.storage_offset()
    values = kv_cache.as_strided(
        (num_blocks, block_size, head_dim), (block_stride, head_dim, 1), offset
    )
    scales = kv_cache.as_strided(
        (num_blocks, block_size, scale_bytes),
        (block_stride, scale_bytes, 1),
        offset + block_size * head_dim,
    )
    return values, scales


def real_slots(slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token indices and slots of the tokens that have a slot (padding is < 0)."""
    tokens = (slot_mapping >= 0).nonzero().squeeze(1)
    return tokens, slot_mapping[tokens]


def indexer_k_quant_and_cache(
    k: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    quant_block_size: int,
    kv_cache_dtype: str,
) -> None:
    """Quantize indexer keys and write them to their slots.

    Args:
        k: ``[num_tokens, head_dim]`` float.
        kv_cache: ``[num_blocks, block_size, head_dim + 4 * groups]`` uint8.
        slot_mapping: ``[num_tokens]`` int64; < 0 writes nothing.
        quant_block_size: Values that share a scale.
        kv_cache_dtype: The scale format; ``"ue8m0"`` rounds to powers of two.

    Raises:
        ValueError: If `head_dim` is not a multiple of `quant_block_size`.
    """
    head_dim = k.shape[1]
    if head_dim % quant_block_size:
        raise ValueError(
            f"head_dim {head_dim} must be a multiple of quant_block_size "
            f"{quant_block_size}"
        )
    tokens, slots = real_slots(slot_mapping)
    if not len(tokens):
        return
    groups = k[tokens].float().unflatten(-1, (-1, quant_block_size))
    scale = groups.abs().amax(dim=-1).clamp_(min=1e-4) / FP8_MAX
    if kv_cache_dtype == "ue8m0":
        scale = _ue8m0(scale)
    quantized = to_fp8(groups, scale.unsqueeze(-1)).flatten(-2)

    values, scales = _page_views(kv_cache, head_dim, 4 * scale.shape[1])
    block_size = kv_cache.shape[1]
    block, offset = slots // block_size, slots % block_size
    values[block, offset] = quantized.view(torch.uint8)
    scales[block, offset] = scale.view(torch.uint8)


def _gather_pages(
    kv_cache: torch.Tensor, head_dim: int, block_table: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of the first `num_tokens` tokens of one request."""
    values, scales = _page_views(kv_cache, head_dim, kv_cache.shape[2] - head_dim)
    num_pages = -(-num_tokens // kv_cache.shape[1])
    pages = block_table[:num_pages].long()
    return (
        values[pages].flatten(0, 1)[:num_tokens],
        scales[pages].flatten(0, 1)[:num_tokens],
    )


def cp_gather_indexer_k_quant_cache(
    kv_cache: torch.Tensor,
    dst_k: torch.Tensor,
    dst_scale: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
) -> None:
    """Gather the indexer keys of several requests into one run of tokens.

    Args:
        kv_cache: ``[num_blocks, block_size, head_dim + 4 * groups]`` uint8.
        dst_k: ``[>= total tokens, head_dim]`` fp8, written.
        dst_scale: ``[>= total tokens, 4 * groups]`` uint8, written.
        block_table: ``[num_requests, max_blocks]`` int32.
        cu_seq_lens: ``[num_requests + 1]`` int32.
    """
    head_dim = dst_k.shape[1]
    bounds = cu_seq_lens.tolist()
    for request, (start, end) in enumerate(zip(bounds, bounds[1:])):
        # An upper bound of the lengths may have sized the destination.
        end = min(end, dst_k.shape[0])
        if start >= end:
            continue
        k, scale = _gather_pages(kv_cache, head_dim, block_table[request], end - start)
        dst_k[start:end].view(torch.uint8).copy_(k)
        dst_scale[start:end].view(torch.uint8).copy_(scale)


def _weighted_logits(
    q: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Indexer scores ``sum_h relu(q_h . k * k_scale) * weights_h``.

    Args:
        q: ``[M, H, D]`` fp8.
        k: ``[N, D]`` fp8.
        k_scale: ``[N]`` fp32.
        weights: ``[M, H]`` fp32, the scale of `q` folded in.

    Returns:
        ``[M, N]`` fp32.
    """
    num_rows, num_heads, head_dim = q.shape
    dots = (q.double().view(-1, head_dim) @ k.double().T).float()
    dots = (dots.view(num_rows, num_heads, -1) * k_scale).relu_()
    logits = torch.zeros(num_rows, k.shape[0], dtype=torch.float32, device=q.device)
    # Head by head: a reduction's order would depend on the number of columns.
    for head in range(num_heads):
        logits += dots[:, head] * weights[:, head, None]
    return logits


def fp8_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    clean_logits: bool,
) -> torch.Tensor:
    """Indexer scores of prefill rows over gathered keys.

    Args:
        q: ``([M, H, D] fp8, None)``.
        kv: ``([N, D] fp8, [N] fp32)``.
        weights: ``[M, H]`` fp32.
        cu_seqlen_ks: ``[M]`` int32, first key of a row.
        cu_seqlen_ke: ``[M]`` int32, end of a row's keys.
        clean_logits: Set scores outside a row's keys to ``-inf``.

    Returns:
        ``[M, N]`` fp32.

    Raises:
        NotImplementedError: For MXFP4 queries.
    """
    q_values, q_scale = q
    if q_scale is not None:
        raise NotImplementedError("the CPU reference indexer supports fp8 keys only")
    k, k_scale = kv
    logits = _weighted_logits(q_values, k, k_scale, weights.float())
    if clean_logits:
        column = torch.arange(k.shape[0], device=k.device)
        valid = (column >= cu_seqlen_ks[:, None]) & (column < cu_seqlen_ke[:, None])
        logits.masked_fill_(~valid, -torch.inf)
    return logits


def fp8_paged_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: torch.Tensor,
    max_model_len: int,
    clean_logits: bool,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Indexer scores of decode rows over paged keys.

    Args:
        q: ``([B, next_n, H, D] fp8, None)``.
        kv_cache: ``[num_blocks, block_size, 1, D + 4]`` uint8.
        weights: ``[B * next_n, H]`` fp32.
        context_lens: ``[B, next_n]`` or ``[B]`` int32, keys of a row.
        block_tables: ``[B, max_blocks]`` int32.
        schedule_metadata: Not used.
        max_model_len: Columns of the result.
        clean_logits: Set scores beyond a row's keys to ``-inf``.
        indices: Not used (variable lengths are a CUDA feature).

    Returns:
        ``[B * next_n, max_model_len]`` fp32; columns past a row's keys are
        undefined unless `clean_logits`.

    Raises:
        NotImplementedError: For MXFP4 queries.
    """
    q_values, q_scale = q
    if q_scale is not None:
        raise NotImplementedError("the CPU reference indexer supports fp8 keys only")
    batch, next_n, _, head_dim = q_values.shape
    cache = kv_cache.squeeze(2)
    logits = torch.empty(batch * next_n, max_model_len, dtype=torch.float32)
    if clean_logits:
        logits.fill_(-torch.inf)
    longest = context_lens.view(batch, -1).amax(dim=1).tolist()
    for request, length in enumerate(longest):
        if length <= 0:
            continue
        k, scale = _gather_pages(cache, head_dim, block_tables[request], length)
        rows = slice(request * next_n, (request + 1) * next_n)
        logits[rows, :length] = _weighted_logits(
            q_values[request],
            k.view(FP8),
            scale.contiguous().view(torch.float32).squeeze(1),
            weights[rows].float(),
        )
        if clean_logits and context_lens.dim() == 2:
            column = torch.arange(length)
            beyond = column >= context_lens[request, :, None]
            logits[rows, :length].masked_fill_(beyond, -torch.inf)
    return logits


def _top_k_row(scores: torch.Tensor, indices: torch.Tensor, top_k: int) -> None:
    """Write the positions of the largest scores of one row; pad with -1.

    A row of at most `top_k` scores is written in order, as on CUDA. Ties go to
    the lower position, so the result does not depend on the batch.
    """
    length = scores.shape[0]
    if length <= top_k:
        indices[:length] = torch.arange(length, dtype=indices.dtype)
        indices[length:top_k] = PAD_INDEX
        return
    order = torch.sort(scores, descending=True, stable=True).indices
    indices[:top_k] = order[:top_k]


def top_k_per_row_prefill(
    logits: torch.Tensor,
    rowStarts: torch.Tensor,
    rowEnds: torch.Tensor,
    indices: torch.Tensor,
    numRows: int,
    stride0: int,
    stride1: int,
    topK: int,
) -> None:
    """Select the `topK` best keys of each prefill row.

    Args:
        logits: ``[numRows, N]`` fp32.
        rowStarts: ``[numRows]`` int32.
        rowEnds: ``[numRows]`` int32.
        indices: ``[numRows, topK]`` int32, written with positions relative to the
            row's start; -1 pads.
        numRows: Rows to do.
        stride0: Not used.
        stride1: Not used.
        topK: Positions to select.
    """
    bounds = zip(rowStarts.tolist(), rowEnds.tolist())
    for row, (start, end) in zip(range(numRows), bounds):
        _top_k_row(logits[row, start:end], indices[row], topK)


def top_k_per_row_decode(
    logits: torch.Tensor,
    next_n: int,
    seq_lens: torch.Tensor,
    indices: torch.Tensor,
    numRows: int,
    stride0: int,
    stride1: int,
    topK: int,
) -> None:
    """Select the `topK` best keys of each decode row.

    Args:
        logits: ``[numRows, columns]`` fp32.
        next_n: Query rows of a request.
        seq_lens: ``[B, next_n]`` int32, keys of each row, or ``[B]``, keys of a
            request's last row.
        indices: ``[numRows, topK]`` int32, written; -1 pads.
        numRows: Rows to do.
        stride0: Not used.
        stride1: Not used.
        topK: Positions to select.
    """
    if seq_lens.dim() == 2:
        ends = seq_lens.flatten()
    else:
        last = seq_lens[:, None] - next_n + 1
        ends = (last + torch.arange(next_n, dtype=last.dtype)).flatten()
    for row, end in zip(range(numRows), ends.tolist()):
        _top_k_row(logits[row, : max(0, end)], indices[row], topK)
