# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""vLLM configurations and cache specs for the tests of HiSparse's planning."""

import json
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from tiny_glm.sizes import TinyGlmSizes, model_config

NAME = "HiSparseConnector"
TINY_TOPK = 32

# GLM-5.3's config.json where it differs from the tiny one's.
GLM = {
    "num_hidden_layers": 78,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "qk_head_dim": 256,
    "v_head_dim": 256,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 1_048_576,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "dtype": "bfloat16",
}

if NAME not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector(NAME, "vllm.v1.hisparse.glue.connector", NAME)


def write_model(folder: Path, changes: dict[str, Any] | None = None) -> str:
    """Write a model's config.json, the tiny GLM's with `changes`; no weights."""
    config = {**model_config(TinyGlmSizes()), **(changes or {})}
    if changes:
        config = {k: v for k, v in config.items() if v is not None}
        if "num_hidden_layers" in changes:
            del config["mlp_layer_types"], config["indexer_types"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def transfer(pool: Any = 0.25, *, role: str = "kv_both") -> dict[str, Any]:
    """`--kv-transfer-config` with HiSparse alone; `pool` None leaves it out."""
    extra = {} if pool is None else {"host_pool_gib": pool}
    return {
        "kv_connector": NAME,
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


def multi(*children: dict[str, Any], role: str = "kv_both") -> dict[str, Any]:
    """`--kv-transfer-config` with a MultiConnector."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def make_config(
    model: str,
    *,
    kv: dict[str, Any] | None = None,
    options: Any = None,
    drafts: int = 0,
    **args: Any,
) -> VllmConfig:
    """Configuration of a server started with these flags.

    Args:
        model: model folder.
        kv: `--kv-transfer-config`.
        options: `hisparse_config` of `--attention-config`.
        drafts: tokens that the MTP layer drafts.
        **args: other engine arguments.
    """
    defaults: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
    }
    if drafts:
        args["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
    if options is not None:
        args["attention_config"] = {"hisparse_config": options}
    engine_args = EngineArgs(model=model, kv_transfer_config=kv, **(defaults | args))
    return engine_args.create_engine_config()


def dsa_specs(
    num_latents: int,
    leaders: list[int],
    block_size: int = 64,
    dtype: torch.dtype = torch.uint8,
    cache_dtype: str = "fp8_ds_mla",
) -> dict[str, KVCacheSpec]:
    """Cache specs as a DSA model's layers give them."""
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(num_latents):
        prefix = f"model.layers.{layer}.self_attn"
        if layer in leaders:
            specs[f"{prefix}.indexer.k_cache"] = MLAAttentionSpec(
                block_size=block_size,
                num_kv_heads=1,
                head_size=132,
                head_size_v=0,
                dtype=torch.uint8,
            )
        specs[f"{prefix}.attn"] = MLAAttentionSpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=576,
            head_size_v=0,
            dtype=dtype,
            cache_dtype_str=cache_dtype,
            state_content_bytes=656 if cache_dtype == "fp8_ds_mla" else None,
        )
    return specs


def glm_specs(block_size: int = 64) -> dict[str, KVCacheSpec]:
    """GLM-5.3 with its MTP layer, 656-byte rows."""
    return dsa_specs(79, [0, 1, *range(2, 78, 4), 78], block_size)
