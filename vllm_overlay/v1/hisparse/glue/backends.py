# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What attention backends do with resolved rows (D27)."""

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from vllm.logger import init_logger
from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view
from vllm.v1.attention.ops.flashmla import get_mla_metadata

from ..settings import refusal

if TYPE_CHECKING:
    from vllm.v1.attention.backends.mla.flashmla_sparse import (
        FlashMLASparseImpl,
        FlashMLASparseMetadata,
    )

    from .worker import HiSparseLayer

logger = init_logger(__name__)

SUPPORTED = (
    "CPU_MLA_SPARSE",
    "FLASHMLA_SPARSE",
    "FLASHINFER_MLA_SPARSE",
    "FLASH_ATTN_MLA_SPARSE",
)
_RUN_ON = ("CPU_MLA_SPARSE",)


def check_backends(layers: Iterable[Any]) -> None:
    """Refuse latent layers whose backend does not ask for resolved rows.

    It would read latents by host page ids, without an error.

    Raises:
        ValueError: names the backend.
    """
    for name in {layer.attn_backend.get_name() for layer in layers}:
        if name not in SUPPORTED:
            raise refusal(
                "the attention backend",
                name,
                ", ".join(SUPPORTED),
                "choose one with --attention-backend, or serve without HiSparse",
            )
        if name not in _RUN_ON:
            logger.warning_once(
                "HiSparse: its %s path has been checked in Triton's interpreter only; "
                "no GPU has run it yet",
                name,
            )


def flashmla_forward(
    impl: "FlashMLASparseImpl",
    hisparse: "HiSparseLayer",
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    topk: torch.Tensor,
    metadata: "FlashMLASparseMetadata",
) -> torch.Tensor:
    """`FlashMLASparseImpl.forward_mqa` over resolved rows.

    Args:
        impl: The layer's implementation.
        hisparse: The layer's way to its rows.
        q: ``[T, heads, 576]``; for a bf16 cache with padded heads.
        kv_cache: The layer's view of the device pool, ``[blocks, 64, row]``.
        topk: int32 ``[T, K]``, positions.
        metadata: The step's metadata.

    Returns:
        ``[T, heads, 512]``.
    """
    kv_rows, flat_stride = flat_kv_row_view(kv_cache, metadata.block_size)
    if impl.kv_cache_dtype != "fp8_ds_mla":
        return hisparse.attend(
            topk,
            flat_stride,
            lambda tokens, rows, valid: impl._bf16_flash_mla_kernel(
                q[tokens], kv_rows, rows, valid, impl.num_heads
            )[0],
        )

    def attention(
        tokens: slice, rows: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        own: Any = metadata.fp8_extra_metadata
        if len(rows) != len(topk):
            # The kernel plans for one number of tokens, at the first call with it.
            own = replace(own, scheduler_metadata=get_mla_metadata()[0])
        out, _ = impl._fp8_flash_mla_kernel(
            q=q[tokens].unsqueeze(0),
            kv_c_and_k_pe_cache=kv_cache,
            topk_indices=rows.unsqueeze(0),
            kernel_metadata=own,
        )
        return out.squeeze(0)

    # This kernel numbers rows by block * block size + offset, whatever the stride.
    return hisparse.attend(topk, metadata.block_size, attention)


def with_block_table(metadata: Any, block_table: torch.Tensor) -> Any:
    """Metadata of one layer's dense prefill, which gathers by block table.

    Args:
        metadata: Of all layers; not changed.
        block_table: int32 ``[B, P]``, blocks of the layer's stack.
    """
    own = copy.copy(metadata)
    own.prefill = copy.copy(metadata.prefill)
    own.prefill.block_table = block_table[metadata.num_decodes :]
    return own
