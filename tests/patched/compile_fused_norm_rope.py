# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Compile the fused cache write for GPUs, without one: python THIS kernels.py.

Triton's interpreter does not know the compiler's rules. vLLM turns Triton off where
there is no driver, so the file is loaded with stand-ins for the modules it imports.
"""

import importlib.util
import os
import sys
from itertools import product
from types import ModuleType

assert "TRITON_INTERPRET" not in os.environ

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

STAND_INS = {
    "vllm": {},
    "vllm.platforms": {"current_platform": None},
    "vllm.triton_utils": {"tl": tl, "triton": triton},
    "vllm.utils": {},
    "vllm.utils.torch_utils": {"is_quantized_kv_cache": None},
}
POINTERS = {
    "pos_ptr": "*i64",
    "index_k_layer_norm_w_ptr": "*fp32",
    "index_k_layer_norm_bias_ptr": "*fp32",
    "slot_mapping_ptr": "*i64",
    "indexer_slot_mapping_ptr": "*i64",
    "indexer_cache_ptr": "*fp8e4nv",
    "indexer_cache_scale_ptr": "*fp32",
    "mla_cache_scale_ptr": "*fp32",
    "mla_cache_ds_scale_ptr": "*fp32",
    "topk_indices_ptr": "*i32",
}
# GLM-5.3.
CONSTANTS = {
    "Q_DIM": 2048,
    "Q_BLOCK_SIZE": 2048,
    "KV_DIM": 512,
    "KPE_HALF_ROT_DIM": 32,
    "INDEX_K_DIM": 128,
    "INDEX_K_BLOCK_SIZE": 128,
    "INDEX_K_HALF_ROT_DIM": 32,
    "MLA_CACHE_BLOCK_SIZE": 64,
    "MLA_CACHE_FP8": False,
    "TOPK": 2048,
    "TOPK_BLOCK_SIZE": 1024,
    "INDEX_ROPE_INTERLEAVE": True,
    "USE_PDL": True,
}


def load_kernel(path: str) -> triton.JITFunction:
    for name, attributes in STAND_INS.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(attributes)
    spec = importlib.util.spec_from_file_location("fused_kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._fused_norm_rope_kernel


def source(kernel, has_indexer: bool, has_caches: bool, ds_mla: bool) -> ASTSource:
    constants = CONSTANTS | {
        "HAS_INDEXER": has_indexer,
        "MLA_CACHE_DS_MLA": ds_mla,
        "MLA_NUM_TILES": 4 if ds_mla else 1,
        "MLA_TILE_DIM": 128 if ds_mla else 1,
        "index_k_out_ptr": None,
    }
    if not has_caches:
        constants |= {"slot_mapping_ptr": None, "indexer_slot_mapping_ptr": None}
    if not has_caches or not has_indexer:
        constants |= {"indexer_cache_ptr": None, "indexer_cache_scale_ptr": None}
    pointers = POINTERS | ({"mla_cache_ptr": "*fp8e4nv"} if ds_mla else {})
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_eps"):
            signature[name] = "fp32"
        else:
            is_pointer = name.endswith("_ptr")
            signature[name] = pointers.get(name, "*bf16") if is_pointer else "i32"
            attributes[i,] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(name),): constants[name] for name in constants}
    return ASTSource(kernel, signature, values, attributes)


def main() -> None:
    kernel = load_kernel(sys.argv[1])
    for has_indexer, has_caches, ds_mla in product((True, False), repeat=3):
        if ds_mla and not has_caches:
            continue
        for capability in (90, 100):
            triton.compile(
                source(kernel, has_indexer, has_caches, ds_mla),
                target=GPUTarget("cuda", capability, 32),
                options={"launch_pdl": True},
            )
            print("compiled", capability, has_indexer, has_caches, ds_mla)


if __name__ == "__main__":
    main()
