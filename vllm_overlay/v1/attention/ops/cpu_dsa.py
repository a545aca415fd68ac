# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Registers torch forms of the compiled DSA operators for the CPU platform.

On CUDA these are operators of the native libraries. With the same names, signatures
and layouts on the CPU, vLLM's own ``sparse_attn_indexer`` body, indexer metadata
builder and MLA cache update run unchanged there. A build that has an operator keeps
it.
"""

import torch

from .cpu_dsa_indexer import (
    cp_gather_indexer_k_quant_cache,
    indexer_k_quant_and_cache,
    per_token_group_fp8_quant,
    top_k_per_row_decode,
    top_k_per_row_prefill,
)
from .cpu_dsa_latents import concat_and_cache_mla

# Schemas as in vLLM 0.29.0, csrc/libtorch_stable/torch_bindings.cpp.
_OPERATORS = {
    "_C": [
        (
            per_token_group_fp8_quant,
            (
                "(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, "
                "float eps, float fp8_min, float fp8_max, bool scale_ue8m0, "
                "bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()"
            ),
        ),
        (
            top_k_per_row_prefill,
            (
                "(Tensor logits, Tensor rowStarts, Tensor rowEnds, Tensor! indices, "
                "int numRows, int stride0, int stride1, int topK) -> ()"
            ),
        ),
        (
            top_k_per_row_decode,
            (
                "(Tensor logits, int next_n, Tensor seq_lens, Tensor! indices, "
                "int numRows, int stride0, int stride1, int topK) -> ()"
            ),
        ),
    ],
    "_C_cache_ops": [
        (
            concat_and_cache_mla,
            (
                "(Tensor kv_c, Tensor k_pe, Tensor! kv_cache, Tensor slot_mapping, "
                "str kv_cache_dtype, Tensor scale) -> ()"
            ),
        ),
        (
            indexer_k_quant_and_cache,
            (
                "(Tensor k, Tensor! kv_cache, Tensor slot_mapping, "
                "int quant_block_size, str kv_cache_dtype) -> ()"
            ),
        ),
        (
            cp_gather_indexer_k_quant_cache,
            (
                "(Tensor kv_cache, Tensor! dst_k, Tensor! dst_scale, "
                "Tensor block_table, Tensor cu_seq_lens) -> ()"
            ),
        ),
    ],
}

# Keeps the registrations alive.
_libraries: list[torch.library.Library] = []


def register() -> None:
    """Register the operators for the CPU where the build lacks them.

    Idempotent. Called by the CPU platform when it loads its compiled operators.
    """
    if _libraries:
        return
    for namespace, operators in _OPERATORS.items():
        library = torch.library.Library(namespace, "FRAGMENT")
        _libraries.append(library)
        for function, schema in operators:
            name = function.__name__
            if not hasattr(getattr(torch.ops, namespace), name):
                library.define(name + schema)
                library.impl(name, function, "CPU")
