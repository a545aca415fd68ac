# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Reference sparse-MLA backend for the CPU platform, in torch.

It lets DSA models (DeepSeek V3.2, GLM-5) run end to end on a machine without a
GPU, to check the engine around them; speed is not a goal. All tokens, prefill
and decode, take the top-k path. Top-k positions become physical rows through the
function that the GPU backends use, `triton_convert_req_index_to_global_index`.

A token's output depends on its own query and rows only, not on the batch: it is
computed token by token with element-wise products and a reduction whose length is
the token's own number of rows.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Optional

import numpy as np
import torch

from vllm.config import VllmConfig
from vllm.config.cache import CacheDType
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MLAAttentionImpl,
    MultipleOf,
)
from vllm.v1.attention.backends.mla.sparse_utils import (
    flat_kv_row_view,
    triton_convert_req_index_to_global_index,
)
from vllm.v1.attention.ops.cpu_dsa_latents import unpack_ds_mla_rows
from vllm.v1.kv_cache_interface import AttentionSpec

if TYPE_CHECKING:
    from vllm.model_executor.models.deepseek_v2 import Indexer

# The conversion kernel wants a tile width that divides the number of top-k
# positions; 128 is its default.
MAX_CONVERT_TILE = 128


class CPUMLASparseBackend(AttentionBackend):
    """Sparse MLA on the CPU, for tests and demonstrations."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "bfloat16",
        "float16",
        "fp8_ds_mla",
    ]

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA_SPARSE"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @staticmethod
    def get_builder_cls() -> type["CPUMLASparseMetadataBuilder"]:
        return CPUMLASparseMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type["CPUMLASparseImpl"]:
        return CPUMLASparseImpl

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


@dataclass
class CPUMLASparseMetadata(AttentionMetadata):
    """Metadata of one step.

    Attributes:
        num_reqs: Requests of the batch.
        max_query_len: Most query tokens of a request.
        max_seq_len: Longest context.
        num_actual_tokens: Query tokens without padding.
        query_start_loc: ``[num_reqs + 1]`` int32.
        slot_mapping: ``[num_actual_tokens]`` int64.
        block_table: ``[num_reqs, max_blocks]`` int32.
        req_id_per_token: ``[num_actual_tokens]`` int32, index in the batch.
        block_size: Tokens of a block.
        topk_tokens: Rows a token attends to at most.
        num_decodes: All requests: the MLA layer sends "decodes" to `forward_mqa`.
        num_decode_tokens: All tokens.
        num_prefills: None.
    """

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    req_id_per_token: torch.Tensor
    block_size: int
    topk_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0


class CPUMLASparseMetadataBuilder(AttentionMetadataBuilder[CPUMLASparseMetadata]):
    """Builds the metadata of one step from the runner's common metadata."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.topk_tokens = vllm_config.model_config.hf_config.index_topk

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUMLASparseMetadata:
        num_tokens = common_attn_metadata.num_actual_tokens
        query_lens = np.diff(common_attn_metadata.query_start_loc_cpu.numpy())
        request = np.repeat(np.arange(len(query_lens), dtype=np.int32), query_lens)
        # Padding tokens belong to no request; any valid row of the table will do.
        req_id_per_token = np.zeros(num_tokens, dtype=np.int32)
        req_id_per_token[: len(request)] = request[:num_tokens]
        return CPUMLASparseMetadata(
            num_reqs=common_attn_metadata.num_reqs,
            max_query_len=common_attn_metadata.max_query_len,
            max_seq_len=common_attn_metadata.max_seq_len,
            num_actual_tokens=num_tokens,
            query_start_loc=common_attn_metadata.query_start_loc,
            slot_mapping=common_attn_metadata.slot_mapping,
            block_table=common_attn_metadata.block_table_tensor,
            req_id_per_token=torch.from_numpy(req_id_per_token),
            block_size=self.kv_cache_spec.block_size,
            topk_tokens=self.topk_tokens,
            num_decodes=common_attn_metadata.num_reqs,
            num_decode_tokens=num_tokens,
        )


class CPUMLASparseImpl(MLAAttentionImpl[CPUMLASparseMetadata]):
    """Sparse MQA over the rows that the indexer picked."""

    is_sparse = True
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        # MLA-specific arguments
        topk_indices_buffer: torch.Tensor | None = None,
        indexer: Optional["Indexer"] = None,
        **mla_args,
    ) -> None:
        unsupported = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
        }
        if not HAS_TRITON:
            raise ValueError(
                "Sparse attention on the CPU needs Triton's interpreter for vLLM's "
                "metadata kernels: install triton and set TRITON_INTERPRET=1"
            )
        given = [name for name, value in unsupported.items() if value]
        if given or attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                "CPU_MLA_SPARSE supports plain decoder self-attention only, got "
                f"attn_type={attn_type} and {given or 'nothing else'}"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank: int = mla_args["kv_lora_rank"]
        # Layers without an indexer (IndexShare followers) read the buffer that
        # their leader wrote.
        self.topk_indices_buffer = (
            indexer.topk_indices_buffer if indexer is not None else topk_indices_buffer
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: CPUMLASparseMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to the selected rows.

        Args:
            q: ``[T, heads, kv_lora_rank + rope]``, or its two parts.
            kv_c_and_k_pe_cache: ``[num_blocks, block_size, row]``.
            attn_metadata: This step's metadata.
            layer: The attention layer.

        Returns:
            ``[T, heads, kv_lora_rank]`` in the dtype of `q`, and no log-sum-exp.
        """
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        assert self.topk_indices_buffer is not None
        num_tokens = q.shape[0]
        kv_rows, block_stride_rows = flat_kv_row_view(
            kv_c_and_k_pe_cache, attn_metadata.block_size
        )
        topk = self.topk_indices_buffer[:num_tokens]
        if (hisparse := getattr(layer, "hisparse", None)) is not None:
            out = hisparse.attend(
                topk,
                block_stride_rows,
                lambda tokens, rows, _: self._attend(q[tokens], kv_rows, rows),
            )
            return out, None
        row_ids = triton_convert_req_index_to_global_index(
            attn_metadata.req_id_per_token,
            attn_metadata.block_table,
            topk,
            BLOCK_SIZE=attn_metadata.block_size,
            BLOCK_STRIDE_ROWS=block_stride_rows,
            NUM_TOPK_TOKENS=attn_metadata.topk_tokens,
            BLOCK_N=_convert_tile(attn_metadata.topk_tokens),
        )
        return self._attend(q, kv_rows, row_ids), None

    def _attend(
        self, q: torch.Tensor, kv_rows: torch.Tensor, row_ids: torch.Tensor
    ) -> torch.Tensor:
        out = q.new_zeros(q.shape[0], self.num_heads, self.kv_lora_rank)
        for token in range(q.shape[0]):
            valid = row_ids[token][row_ids[token] >= 0].long()
            if valid.numel() == 0:
                continue
            keys = kv_rows[valid]
            if self.kv_cache_dtype == "fp8_ds_mla":
                keys = unpack_ds_mla_rows(keys.view(torch.uint8))
            keys = keys.float()
            scores = (q[token].float().unsqueeze(1) * keys).sum(dim=-1) * self.scale
            weights = torch.softmax(scores, dim=-1).unsqueeze(-1)
            out[token] = (weights * keys[:, : self.kv_lora_rank]).sum(dim=1)
        return out


def _convert_tile(topk_tokens: int) -> int:
    """Largest power of two that divides `topk_tokens`, at most 128."""
    return min(topk_tokens & -topk_tokens, MAX_CONVERT_TILE)
