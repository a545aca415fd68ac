# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Weights of the tiny GLM, and the file they are written to.

The weights are random, but not arbitrary: gains are chosen so that a lost KV row,
a wrong selection or a wrong expert is visible in the log-probabilities, and so that
the MTP layer is accepted often enough to exercise that path. They are made from
integers with exact arithmetic (no libm, no torch), one stream per tensor, so the
same seed gives the same bytes on every machine.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .sizes import TinyGlmSizes
from .tokenizer import VOCAB_SIZE, printable_ids

Tensors = Iterator[tuple[str, np.ndarray]]

# Channel 0 of the residual stream holds a constant: every embedding has it and no
# layer writes to it. It stands in for the biases that the architecture lacks.
BIAS_CHANNEL = 0
BIAS_VALUE = 4.0
# The query latent gets it in this channel.
QUERY_BIAS_CHANNEL = 0
EMBED_GAIN = 1.5
# Attention scores of this standard deviation: a row weighs enough to be missed, and
# no row takes everything.
SCORE_GAIN = 3.0
ATTENTION_GAIN = 2.0
MLP_GAIN = 1.0
ROUTER_GAIN = 1.5
QUERY_SHIFT = 3.0
KEY_SHIFT = 2.6
LOGIT_GAIN = 2.5
QUIET_LOGIT_GAIN = 0.25
# How loudly a printable byte calls for its successor.
FOLLOW_GAIN = 6.8
# The MTP layer: what it takes from the token's embedding and from the hidden state,
# and how much its own block adds.
MTP_EMBED_SHARE = 0.5
MTP_HIDDEN_SHARE = 0.25
MTP_BLOCK_GAIN = 0.5


class _Draw:
    """Named random matrices from one seed; each name has a stream of its own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def unit(self, name: str, *shape: int) -> np.ndarray:
        """Uniform float32 values of mean 0 and variance 1, a pure function of name.

        The steps are exact: 24 random bits, centred, times one constant. So no
        platform's rounding or math library can change a byte.
        """
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        raw = np.random.PCG64(int.from_bytes(digest, "little")).random_raw(
            math.prod(shape)
        )
        centred = (raw >> np.uint64(40)).astype(np.int64) - (1 << 23)
        scale = np.float32(math.sqrt(3) / (1 << 23))
        return (centred.astype(np.float32) * scale).reshape(shape)

    def linear(self, name: str, rows: int, columns: int, gain: float) -> np.ndarray:
        """A matrix that turns unit-variance input into output of RMS `gain`."""
        return self.unit(name, rows, columns) * np.float32(gain / math.sqrt(columns))

    def from_hidden(self, name: str, rows: int, hidden: int, gain: float) -> np.ndarray:
        """As `linear`, but blind to the bias channel: the same to every token, it would
        make all tokens alike.
        """
        matrix = self.linear(name, rows, hidden, gain)
        matrix[:, BIAS_CHANNEL] = 0
        return matrix

    def norm(self, name: str, size: int) -> np.ndarray:
        """A norm's weight: near one, and different in every channel."""
        return 1 + self.unit(name, size) * np.float32(0.1)


def _silence_bias_channel(matrix: np.ndarray) -> np.ndarray:
    matrix[BIAS_CHANNEL] = 0
    return matrix


def _attention(draw: _Draw, prefix: str, sizes: TinyGlmSizes, gain: float) -> Tensors:
    hidden, heads = sizes.hidden, sizes.heads
    qk_dim = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
    q_name, kv_name = f"{prefix}.q_a_proj.weight", f"{prefix}.kv_a_proj_with_mqa.weight"
    q_a = draw.from_hidden(q_name, sizes.q_lora_rank, hidden, 1)
    q_a[QUERY_BIAS_CHANNEL] = 0
    q_a[QUERY_BIAS_CHANNEL, BIAS_CHANNEL] = 2
    yield q_name, q_a
    name = f"{prefix}.q_a_layernorm.weight"
    yield name, draw.norm(name, sizes.q_lora_rank)
    name = f"{prefix}.q_b_proj.weight"
    yield name, draw.linear(name, heads * qk_dim, sizes.q_lora_rank, SCORE_GAIN)
    kv_rows = sizes.kv_lora_rank + sizes.qk_rope_head_dim
    yield kv_name, draw.from_hidden(kv_name, kv_rows, hidden, 1)
    name = f"{prefix}.kv_a_layernorm.weight"
    yield name, draw.norm(name, sizes.kv_lora_rank)
    name = f"{prefix}.kv_b_proj.weight"
    rows = heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
    yield name, draw.linear(name, rows, sizes.kv_lora_rank, 1)
    name = f"{prefix}.o_proj.weight"
    o_proj = draw.linear(name, hidden, heads * sizes.v_head_dim, gain * ATTENTION_GAIN)
    yield name, _silence_bias_channel(o_proj)


def _indexer(draw: _Draw, prefix: str, sizes: TinyGlmSizes) -> Tensors:
    """Index scores: the sum over heads of weight * relu(query . key).

    A score of exactly 0 (every head cut off by its relu) ties with all others of its
    kind, and implementations break ties differently. So a constant in the dimensions
    that rotary leaves alone shifts query . key up by twice its standard deviation, and
    the bias channel keeps the head weights positive.
    """
    heads, dim = sizes.index_heads, sizes.index_head_dim
    # The shift has one direction. What the queries have of it favours the same keys for
    # all of them, so that a good part of a selection stays from token to token.
    unrotated = np.arange(dim) >= sizes.qk_rope_head_dim
    direction = unrotated / np.float32(math.sqrt(max(unrotated.sum(), 1)))
    name = f"{prefix}.wq_b.weight"
    wq_b = draw.linear(name, heads * dim, sizes.q_lora_rank, 1)
    wq_b[:, QUERY_BIAS_CHANNEL] = np.tile(direction * np.float32(QUERY_SHIFT), heads)
    yield name, wq_b
    name = f"{prefix}.wk.weight"
    yield name, draw.from_hidden(name, dim, sizes.hidden, 1)
    name = f"{prefix}.k_norm.weight"
    yield name, draw.norm(name, dim)
    name = f"{prefix}.k_norm.bias"
    yield (
        name,
        draw.unit(name, dim) * np.float32(0.1) + direction * np.float32(KEY_SHIFT),
    )
    name = f"{prefix}.weights_proj.weight"
    weights = draw.from_hidden(name, heads, sizes.hidden, 0.3)
    weights[:, BIAS_CHANNEL] = 1
    yield name, weights


def _mlp(draw: _Draw, prefix: str, hidden: int, width: int, gain: float) -> Tensors:
    for part in ("gate_proj", "up_proj"):
        name = f"{prefix}.{part}.weight"
        yield name, draw.from_hidden(name, width, hidden, 1)
    name = f"{prefix}.down_proj.weight"
    down = draw.linear(name, hidden, width, gain * MLP_GAIN)
    yield name, _silence_bias_channel(down)


def _moe(draw: _Draw, prefix: str, sizes: TinyGlmSizes, gain: float) -> Tensors:
    name = f"{prefix}.gate.weight"
    yield name, draw.from_hidden(name, sizes.experts, sizes.hidden, ROUTER_GAIN)
    name = f"{prefix}.gate.e_score_correction_bias"
    yield name, draw.unit(name, sizes.experts) * np.float32(0.05)
    for expert in range(sizes.experts):
        expert_prefix = f"{prefix}.experts.{expert}"
        yield from _mlp(draw, expert_prefix, sizes.hidden, sizes.expert_width, gain)
    shared = f"{prefix}.shared_experts"
    yield from _mlp(draw, shared, sizes.hidden, sizes.expert_width, gain)


def _layer(draw: _Draw, layer: int, sizes: TinyGlmSizes, gain: float) -> Tensors:
    prefix = f"model.layers.{layer}"
    for part in ("input_layernorm", "post_attention_layernorm"):
        name = f"{prefix}.{part}.weight"
        yield name, draw.norm(name, sizes.hidden)
    yield from _attention(draw, f"{prefix}.self_attn", sizes, gain)
    if sizes.is_leader(layer):
        yield from _indexer(draw, f"{prefix}.self_attn.indexer", sizes)
    if layer < sizes.dense_layers:
        yield from _mlp(draw, f"{prefix}.mlp", sizes.hidden, sizes.dense_width, gain)
    else:
        yield from _moe(draw, f"{prefix}.mlp", sizes, gain)


def _embedding(draw: _Draw, sizes: TinyGlmSizes) -> np.ndarray:
    name = "model.embed_tokens.weight"
    embedding = draw.unit(name, VOCAB_SIZE, sizes.hidden) * np.float32(EMBED_GAIN)
    embedding[:, BIAS_CHANNEL] = BIAS_VALUE
    return embedding


def _head(draw: _Draw, sizes: TinyGlmSizes, embedding: np.ndarray) -> np.ndarray:
    """The output matrix: loud for printable bytes, quiet for others, 0 for specials.

    So greedy text is printable, and no answer ends early because a special token won.
    Each printable byte also favours its successor, which is the part of the next token
    that an MTP layer can foresee. The successors form one cycle of all these bytes, so
    that a text that follows them is not in a short loop.
    """
    head = draw.from_hidden("lm_head.weight", VOCAB_SIZE, sizes.hidden, 1)
    printable = printable_ids()
    follow = embedding[np.roll(printable, 1)]
    head[printable] += follow * np.float32(FOLLOW_GAIN / sizes.hidden)
    head[:, BIAS_CHANNEL] = 0
    gain = np.zeros((VOCAB_SIZE, 1), np.float32)
    gain[:256] = QUIET_LOGIT_GAIN
    gain[printable] = LOGIT_GAIN
    return head * gain


def _mtp_layer(
    draw: _Draw,
    layer: int,
    sizes: TinyGlmSizes,
    embedding: np.ndarray,
    head: np.ndarray,
) -> Tensors:
    """One multi-token-prediction layer.

    A random one would have no draft accepted. This one passes the token's embedding
    and the previous hidden state on, so it predicts what the main model would say
    without the newest context.
    """
    prefix = f"model.layers.{layer}"
    hidden = sizes.hidden
    yield f"{prefix}.embed_tokens.weight", embedding
    for part in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{prefix}.{part}.weight", np.ones(hidden, np.float32)
    name = f"{prefix}.eh_proj.weight"
    eh_proj = draw.unit(name, hidden, 2 * hidden) * np.float32(0.02)
    diagonal = np.arange(hidden)
    eh_proj[diagonal, diagonal] += np.float32(MTP_EMBED_SHARE)
    eh_proj[diagonal, diagonal + hidden] += np.float32(MTP_HIDDEN_SHARE)
    yield name, eh_proj
    yield f"{prefix}.shared_head.head.weight", head
    yield from _layer(draw, layer, sizes, MTP_BLOCK_GAIN)


def model_tensors(sizes: TinyGlmSizes) -> Tensors:
    """All tensors as (checkpoint name, float32 array), in a fixed order."""
    draw = _Draw(sizes.seed)
    embedding = _embedding(draw, sizes)
    head = _head(draw, sizes, embedding)
    yield "model.embed_tokens.weight", embedding
    for layer in range(sizes.layers):
        yield from _layer(draw, layer, sizes, 1)
    yield "model.norm.weight", draw.norm("model.norm.weight", sizes.hidden)
    yield "lm_head.weight", head
    for layer in range(sizes.layers, sizes.layers + sizes.mtp_layers):
        yield from _mtp_layer(draw, layer, sizes, embedding, head)


def _to_bytes(name: str, array: np.ndarray, dtype: str) -> tuple[str, bytes]:
    """The array as safetensors' type name and little-endian bytes."""
    array = np.ascontiguousarray(array, "<f4")
    # The router's correction bias is fp32 in every GLM checkpoint.
    if dtype == "float32" or name.endswith("e_score_correction_bias"):
        return "F32", array.tobytes()
    bits = array.view("<u4")
    # Round to nearest, ties to even: numpy has no bfloat16.
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return "BF16", (rounded >> np.uint32(16)).astype("<u2").tobytes()


def write_safetensors(path: Path, tensors: Tensors, dtype: str) -> int:
    """Write `tensors` as one safetensors file and return its size in bytes.

    Written by hand because the format is small and the bytes then do not depend on
    the version of a library.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    chunks: list[bytes] = []
    offset = 0
    for name, array in tensors:
        dtype_name, data = _to_bytes(name, array, dtype)
        header[name] = {
            "dtype": dtype_name,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    # The data begins at a multiple of 8; the format pads with spaces.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        file.writelines(chunks)
    return 8 + len(text) + offset
