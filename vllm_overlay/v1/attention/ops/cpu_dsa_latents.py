# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Torch reference of the MLA latent cache, for the CPU platform.

The signatures are those of the compiled CUDA operators. A row of the format
``fp8_ds_mla`` has 656 bytes: 512 fp8 values, 4 fp32 scales (one for each 128
values) and 64 bf16 rope values (source: vLLM 0.29.0,
``v1/attention/backends/mla/flashmla_sparse.py``).
"""

import torch

from .cpu_dsa_indexer import FP8, FP8_MAX, PAD_INDEX, real_slots, to_fp8

FLT_MIN = torch.finfo(torch.float32).tiny

DS_MLA_LATENT_DIM = 512
DS_MLA_ROPE_DIM = 64
DS_MLA_TILE = 128
DS_MLA_NUM_TILES = DS_MLA_LATENT_DIM // DS_MLA_TILE


def convert_req_index_to_global_index(
    req_id: torch.Tensor,
    block_table: torch.Tensor,
    token_indices: torch.Tensor,
    block_size: int,
    block_stride_rows: int,
    return_valid_counts: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Turn top-k positions into physical rows; torch form of the Triton kernel.

    Args:
        req_id: ``[num_tokens]`` int32, the request (table row) of a token.
        block_table: ``[num_requests, max_blocks]`` int32.
        token_indices: ``[num_tokens, top_k]`` int32 positions; < 0 pads.
        block_size: Tokens of a block.
        block_stride_rows: Physical rows from one block to the next.
        return_valid_counts: Also count the valid rows of each token.

    Returns:
        ``[num_tokens, top_k]`` int32 physical rows, -1 where the position is
        padding or beyond the table; and, if asked for, ``[num_tokens]`` int32.
    """
    page = token_indices.div(block_size, rounding_mode="floor")
    valid = (page >= 0) & (page < block_table.shape[1])
    block = block_table[req_id.long().unsqueeze(1), page.where(valid, 0).long()]
    # Modular arithmetic as in the kernel's int32.
    rows = block * block_stride_rows + token_indices.remainder(block_size)
    rows = rows.where(valid, PAD_INDEX).to(token_indices.dtype)
    if return_valid_counts:
        return rows, valid.sum(dim=1, dtype=torch.int32)
    return rows


def pack_ds_mla_rows(kv_c: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """Pack latents and rope keys as ``fp8_ds_mla`` rows.

    Args:
        kv_c: ``[num_tokens, 512]`` float.
        k_pe: ``[num_tokens, 64]`` float.

    Returns:
        ``[num_tokens, 656]`` uint8.
    """
    tiles = kv_c.float().unflatten(-1, (DS_MLA_NUM_TILES, DS_MLA_TILE))
    scale = (tiles.abs().amax(dim=-1) / FP8_MAX).clamp_(min=FLT_MIN)
    values = to_fp8(tiles, scale.unsqueeze(-1)).flatten(-2)
    rope = k_pe.to(torch.bfloat16).contiguous()
    parts = (values, scale, rope)
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def unpack_ds_mla_rows(rows: torch.Tensor) -> torch.Tensor:
    """Dequantize ``fp8_ds_mla`` rows.

    Args:
        rows: ``[num_rows, 656]`` uint8, contiguous.

    Returns:
        ``[num_rows, 576]`` fp32: latents, then rope keys.
    """
    values, scale, rope = rows.split(
        [DS_MLA_LATENT_DIM, 4 * DS_MLA_NUM_TILES, 2 * DS_MLA_ROPE_DIM], dim=-1
    )
    latents = values.contiguous().view(FP8).float()
    latents = latents.unflatten(-1, (DS_MLA_NUM_TILES, DS_MLA_TILE))
    latents = latents * scale.contiguous().view(torch.float32).unsqueeze(-1)
    return torch.cat(
        [latents.flatten(-2), rope.contiguous().view(torch.bfloat16).float()], dim=-1
    )


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> None:
    """Write latents and rope keys to their slots.

    Args:
        kv_c: ``[>= num_tokens, kv_lora_rank]`` float.
        k_pe: ``[>= num_tokens, rope_dim]`` float.
        kv_cache: ``[num_blocks, block_size, row]``; the block stride may exceed
            the page. uint8 with 656-byte rows for ``fp8_ds_mla``.
        slot_mapping: ``[num_tokens]`` int64; < 0 writes nothing.
        kv_cache_dtype: ``"auto"``, a float dtype's name or ``"fp8_ds_mla"``.
        scale: Not used by these formats.

    Raises:
        NotImplementedError: For other fp8 formats.
    """
    tokens, slots = real_slots(slot_mapping)
    if not len(tokens):
        return
    if kv_cache_dtype == "fp8_ds_mla":
        rows = pack_ds_mla_rows(kv_c[tokens], k_pe[tokens])
    elif kv_cache_dtype.startswith("fp8"):
        raise NotImplementedError(
            f"kv_cache_dtype {kv_cache_dtype!r} is not supported by the CPU reference "
            "of sparse MLA; use 'auto', 'bfloat16' or 'fp8_ds_mla'"
        )
    else:
        rows = torch.cat([kv_c[tokens], k_pe[tokens]], dim=-1).to(kv_cache.dtype)
    block_size = kv_cache.shape[1]
    kv_cache[slots // block_size, slots % block_size] = rows
