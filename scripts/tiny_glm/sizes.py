# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Sizes and configuration of a tiny GLM with sparse attention."""

import dataclasses

from .tokenizer import END_OF_TEXT, SPECIAL_IDS, VOCAB_SIZE


@dataclasses.dataclass(frozen=True)
class TinyGlmSizes:
    """Every size of the model that can be chosen; all counts unless said otherwise.

    Raises:
        ValueError: a value is outside its range; the message names the setting, the
            value, the range and a remedy.
    """

    layers: int = 6
    mtp_layers: int = 1
    dense_layers: int = 1
    hidden: int = 128
    heads: int = 4
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 64
    experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 64
    dense_width: int = 256
    index_topk: int = 32
    index_topk_freq: int = 4
    index_skip_topk_offset: int = 2
    index_heads: int = 4
    index_head_dim: int = 128
    context: int = 4096
    dtype: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (low, high, step) in _RANGES.items():
            _check_int(name, getattr(self, name), low, high, step)
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(
                f"dtype is {self.dtype!r}; allowed are 'float32' and 'bfloat16'\n"
                "remedy: use float32 to compare implementations, else bfloat16"
            )
        _check_at_most(self, "dense_layers", "layers")
        _check_at_most(self, "experts_per_token", "experts")
        _check_at_most(self, "qk_rope_head_dim", "index_head_dim")

    def is_leader(self, layer: int) -> bool:
        """Whether `layer` owns an indexer (the MTP layers, at the end, always do)."""
        skipped = max(layer - self.index_skip_topk_offset + 1, 0)
        return layer >= self.layers or skipped % self.index_topk_freq == 0


# setting: (lowest, highest, multiple of)
_RANGES = {
    "layers": (1, 128, 1),
    "mtp_layers": (0, 4, 1),
    "dense_layers": (0, 128, 1),
    "hidden": (32, 8192, 32),
    "heads": (1, 128, 1),
    "q_lora_rank": (32, 4096, 32),
    "kv_lora_rank": (64, 512, 64),
    "qk_nope_head_dim": (32, 512, 32),
    "qk_rope_head_dim": (32, 128, 32),
    "v_head_dim": (32, 512, 32),
    "experts": (2, 512, 1),
    "experts_per_token": (1, 64, 1),
    "expert_width": (32, 4096, 32),
    "dense_width": (32, 32768, 32),
    "index_topk": (1, 1 << 20, 1),
    "index_topk_freq": (1, 128, 1),
    "index_skip_topk_offset": (1, 128, 1),
    "index_heads": (1, 128, 1),
    "index_head_dim": (128, 512, 128),
    "context": (64, 1 << 20, 1),
    "seed": (0, (1 << 63) - 1, 1),
}


def _check_int(name: str, value: object, low: int, high: int, step: int) -> None:
    if isinstance(value, int) and not isinstance(value, bool):
        if low <= value <= high and value % step == 0:
            return
        nearest = min(max(round(value / step) * step, low), high)
    else:
        nearest = low
    multiple = f", a multiple of {step}" if step > 1 else ""
    raise ValueError(
        f"{name} is {value!r}; allowed is an integer from {low} to {high}{multiple}\n"
        f"remedy: use {nearest}, for instance"
    )


def _check_at_most(sizes: TinyGlmSizes, name: str, limit_name: str) -> None:
    value, limit = getattr(sizes, name), getattr(sizes, limit_name)
    if value > limit:
        raise ValueError(
            f"{name} is {value}; allowed is at most {limit_name}, which is {limit}\n"
            f"remedy: lower {name} or raise {limit_name}"
        )


def model_config(sizes: TinyGlmSizes) -> dict[str, object]:
    """The content of config.json.

    Nothing is left to a default: both readers (vLLM and transformers) have defaults,
    and transformers' are those of the 744-billion-parameter GLM-5.
    """
    layers = range(sizes.layers)
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": sizes.dtype,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.dense_width,
        "moe_intermediate_size": sizes.expert_width,
        "num_hidden_layers": sizes.layers,
        "num_nextn_predict_layers": sizes.mtp_layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "q_lora_rank": sizes.q_lora_rank,
        "kv_lora_rank": sizes.kv_lora_rank,
        "qk_nope_head_dim": sizes.qk_nope_head_dim,
        "qk_rope_head_dim": sizes.qk_rope_head_dim,
        "qk_head_dim": sizes.qk_nope_head_dim + sizes.qk_rope_head_dim,
        "head_dim": sizes.qk_rope_head_dim,
        "v_head_dim": sizes.v_head_dim,
        "n_routed_experts": sizes.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": sizes.experts_per_token,
        "first_k_dense_replace": sizes.dense_layers,
        "mlp_layer_types": [
            "dense" if i < sizes.dense_layers else "sparse" for i in layers
        ],
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "ep_size": 1,
        "index_topk": sizes.index_topk,
        "index_n_heads": sizes.index_heads,
        "index_head_dim": sizes.index_head_dim,
        "index_topk_freq": sizes.index_topk_freq,
        "index_skip_topk_offset": sizes.index_skip_topk_offset,
        "indexer_types": ["full" if sizes.is_leader(i) else "shared" for i in layers],
        "indexer_rope_interleave": True,
        "rope_interleave": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "max_position_embeddings": sizes.context,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        # transformers fixes 1e-6 for the two latent norms, vLLM uses this value for
        # every norm: only 1e-6 means the same model to both.
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": [
            SPECIAL_IDS[name]
            for name in ("<|endoftext|>", "<|user|>", "<|observation|>")
        ],
        "pad_token_id": SPECIAL_IDS[END_OF_TEXT],
    }
