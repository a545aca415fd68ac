# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The fused cache write of the CUDA models, byte for byte, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.models.deepseek_v32 import attention
from vllm.models.deepseek_v32.common import kernels

from fused_cache_rows import (
    INDEX_ROW,
    K_SCALE,
    KV_DIM,
    LATENT_ROWS,
    Q_DIM,
    ROPE_DIM,
    TOPK,
    Pages,
    Step,
)

KINDS = list(LATENT_ROWS)
BLOCKS = 6
GLM_BLOCK_BYTES = 209_920


def row_bytes(kind: str) -> int:
    dtype, width = LATENT_ROWS[kind]
    return dtype.itemsize * width


def pages(layout: str, kind: str) -> tuple[Pages, Pages]:
    """Pages of latents and of an indexer in one slab filled with noise."""
    block_size = 16 if layout == "small" else 64
    latent_page, indexer_page = block_size * row_bytes(kind), block_size * INDEX_ROW
    if layout == "packed":
        # Second latent layer and fifth indexer of blocks that hold either.
        latent_start, indexer_start = latent_page, 4 * indexer_page
        latent_blocks = indexer_blocks = GLM_BLOCK_BYTES
    else:
        apart = 48 if layout == "small" else 0
        latent_blocks, indexer_blocks = latent_page + apart, indexer_page + apart // 4
        latent_start, indexer_start = 0, BLOCKS * latent_blocks
    size = indexer_start + BLOCKS * max(latent_blocks, indexer_blocks)
    noise = torch.Generator().manual_seed(1)
    slab = torch.randint(256, (size,), generator=noise, dtype=torch.uint8)
    return (
        Pages(slab, latent_start, latent_blocks, BLOCKS, block_size),
        Pages(slab, indexer_start, indexer_blocks, BLOCKS, block_size),
    )


def some_slots(tokens: int, block_size: int, first_block: int) -> torch.Tensor:
    """Different slots of three blocks, in no order."""
    noise = torch.Generator().manual_seed(first_block)
    order = torch.randperm(3 * block_size, generator=noise)
    return order[:tokens] + first_block * block_size


def write(step: Step, kind: str, latents: Pages, indexer: Pages, **options):
    """Run the fused write; returns normed queries and the buffer of top-k indices."""
    topk = torch.zeros(len(step.positions), TOPK, dtype=torch.int32)
    q = kernels.fused_norm_rope(
        step.positions, step.q_c, torch.ones(Q_DIM).bfloat16(), 0.0,
        step.kv_c, step.kv_weight, 0.0, step.k_pe, step.cos_sin,
        step.index_k, step.index_weight, step.index_bias, 0.0, step.cos_sin, topk,
        indexer_k_cache=indexer.view(torch.uint8, INDEX_ROW),
        mla_kv_cache=latents.view(*LATENT_ROWS[kind]),
        mla_kv_cache_dtype=kind,
        mla_k_scale=torch.tensor([K_SCALE]),
        index_rope_interleave=step.interleave,
        **options,
    )  # fmt: skip
    return q, topk


def expected(
    step: Step,
    kind: str,
    latents: Pages,
    indexer: Pages,
    latent_slots: torch.Tensor,
    indexer_slots: torch.Tensor,
) -> torch.Tensor:
    """The slab with the rows of all tokens in it; a slot < 0 has none."""
    slab = latents.slab.clone()
    for token, slot in enumerate(latent_slots.tolist()):
        if slot >= 0:
            latents.write_latent(slab, slot, step.latent_row(token, kind))
    for token, slot in enumerate(indexer_slots.tolist()):
        if slot >= 0:
            indexer.write_indexer(slab, slot, *step.indexer_row(token))
    return slab


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 33])
@pytest.mark.parametrize("kind", KINDS)
def test_one_slot_mapping_serves_both_caches_where_only_one_is_given(
    kind: str, tokens: int, interleave: bool
) -> None:
    step = Step.build(tokens, interleave)
    latents, indexer = pages("dense", kind)
    slots = some_slots(tokens, 64, first_block=2)
    want = expected(step, kind, latents, indexer, slots, slots)
    write(step, kind, latents, indexer, slot_mapping=slots)
    assert torch.equal(latents.slab, want)


@pytest.mark.parametrize("tokens", [1, 3, 33])
@pytest.mark.parametrize("layout", ["dense", "small", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_go_to_slots_of_their_own_in_blocks_that_lie_apart(
    kind: str, layout: str, tokens: int
) -> None:
    step = Step.build(tokens)
    latents, indexer = pages(layout, kind)
    latent_slots = some_slots(tokens, latents.block_size, first_block=0)
    indexer_slots = some_slots(tokens, indexer.block_size, first_block=3)
    want = expected(step, kind, latents, indexer, latent_slots, indexer_slots)
    write(
        step, kind, latents, indexer,
        slot_mapping=latent_slots, indexer_slot_mapping=indexer_slots,
    )  # fmt: skip
    assert torch.equal(latents.slab, want)


@pytest.mark.parametrize("kind", KINDS)
def test_token_with_a_slot_for_one_row_writes_that_row_only(kind: str) -> None:
    step = Step.build(4)
    latents, indexer = pages("packed", kind)
    latent_slots = torch.tensor([70, 71, -1, -1])
    indexer_slots = torch.tensor([200, -1, 202, -1])
    want = expected(step, kind, latents, indexer, latent_slots, indexer_slots)
    write(
        step, kind, latents, indexer,
        slot_mapping=latent_slots, indexer_slot_mapping=indexer_slots,
    )  # fmt: skip
    assert torch.equal(latents.slab, want)


def test_padded_token_writes_no_row_and_still_clears_its_topk_indices() -> None:
    step = Step.build(3)
    latents, indexer = pages("packed", "fp8_ds_mla")
    before = latents.slab.clone()
    padding = torch.full((3,), -1)
    q, topk = write(
        step, "fp8_ds_mla", latents, indexer,
        slot_mapping=padding, indexer_slot_mapping=padding.clone(),
    )  # fmt: skip
    assert torch.equal(latents.slab, before)
    assert (topk == -1).all()
    assert torch.equal(q, step.q_c / step.q_c.double().square().mean().sqrt())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_reach_blocks_behind_2_to_the_31_words(kind: str, tmp_path) -> None:
    # A little above 5 * 2**33 bytes: 32 bits would wrap to the start of the slab.
    far = 204_601
    assert 0 < far * GLM_BLOCK_BYTES - (5 << 33) < GLM_BLOCK_BYTES
    # A sparse file: only what is written takes room.
    size = (far + 2) * GLM_BLOCK_BYTES
    slab = torch.from_file(
        str(tmp_path / "slab"), shared=True, size=size, dtype=torch.uint8
    )
    latents, indexer = (
        Pages(slab, start, GLM_BLOCK_BYTES, far + 2, 64)
        for start in (64 * row_bytes(kind), 4 * 64 * INDEX_ROW)
    )
    step = Step.build(1)
    latent_slot, indexer_slot = far * 64 + 5, (far + 1) * 64 + 6
    write(
        step, kind, latents, indexer,
        slot_mapping=torch.tensor([latent_slot]),
        indexer_slot_mapping=torch.tensor([indexer_slot]),
    )  # fmt: skip
    # The last two blocks, as if they were the slab.
    tail = slab[far * GLM_BLOCK_BYTES :]
    want = torch.zeros_like(tail)
    latents.write_latent(want, 5, step.latent_row(0, kind))
    indexer.write_indexer(want, 64 + 6, *step.indexer_row(0))
    assert torch.equal(tail, want)


# --- the layer that calls it ------------------------------------------------------


def layer(step: Step, latents: Pages, indexer: Pages, with_indexer: bool = True):
    """Stands in for `DeepseekV32Attention` up to the end of the cache write."""
    heads, nope = 2, 16
    tokens = len(step.positions)

    def norm(weight, bias=None):
        return SimpleNamespace(weight=weight, variance_epsilon=0.0, bias=bias, eps=0.0)

    rope = SimpleNamespace(cos_sin_cache=step.cos_sin)
    index_weights = torch.zeros(tokens, 2).bfloat16()
    own = SimpleNamespace(
        head_dim=step.index_k.shape[1],
        n_head=1,
        softmax_scale=1.0,
        k_norm=norm(step.index_weight, step.index_bias),
        k_cache=SimpleNamespace(
            prefix="layer.indexer.k_cache",
            kv_cache=indexer.view(torch.uint8, INDEX_ROW),
        ),
        wk_weights_proj=lambda x: (torch.cat([step.index_k, index_weights], 1),),
        wq_b=lambda q: (torch.zeros(tokens, step.index_k.shape[1]),),
    )
    return SimpleNamespace(
        layer_name="layer.attn",
        fused_qkv_a_proj=lambda x: (torch.cat([step.q_c, step.kv_c, step.k_pe], 1),),
        q_lora_rank=Q_DIM,
        kv_lora_rank=KV_DIM,
        qk_rope_head_dim=ROPE_DIM,
        qk_nope_head_dim=nope,
        qk_head_dim=nope + ROPE_DIM,
        v_head_dim=nope,
        num_local_heads=heads,
        indexer=own if with_indexer else None,
        skip_topk=False,
        use_pcp=False,
        kv_cache=latents.view(*LATENT_ROWS["fp8_ds_mla"]),
        kv_cache_dtype="fp8_ds_mla",
        _k_scale=torch.tensor([K_SCALE]),
        _q_scale=torch.tensor([1.0]),
        q_a_layernorm=norm(torch.ones(Q_DIM).bfloat16()),
        kv_a_layernorm=norm(step.kv_weight),
        rotary_emb=rope,
        indexer_rope_emb=rope,
        topk_indices_buffer=torch.zeros(tokens, TOPK, dtype=torch.int32),
        _index_rope_interleave=step.interleave,
        _fp8_query=False,
        q_b_proj=lambda q: (torch.zeros(tokens, heads * (nope + ROPE_DIM)),),
        W_UK_T=torch.zeros(heads, nope, KV_DIM),
        _sparse_indexer_and_attn=lambda *args: None,
        o_proj=lambda x: (x,),
    )


def forward(stand_in, step: Step, monkeypatch, slots: dict, attn_metadata) -> None:
    context = SimpleNamespace(slot_mapping=slots, attn_metadata=attn_metadata)
    monkeypatch.setattr(attention, "get_forward_context", lambda: context)
    monkeypatch.setattr(attention, "fused_q", lambda *args, **kwargs: (None,) * 3)
    hidden = torch.zeros(len(step.positions), 8).bfloat16()
    attention.DeepseekV32Attention.forward(stand_in, step.positions, hidden)


@pytest.fixture
def scene():
    """A step, pages of latents and an indexer, slots, and how far apart they are."""
    latents, indexer = pages("packed", "fp8_ds_mla")
    return Step.build(3), latents, indexer, torch.tensor([5, 64, -1]), 192


def test_layer_writes_by_the_slots_of_its_indexer_and_by_its_own(
    scene, monkeypatch
) -> None:
    step, latents, indexer, slots, apart = scene
    named = {"layer.attn": slots, "layer.indexer.k_cache": slots + apart}
    args = (step, "fp8_ds_mla", latents, indexer)
    want = expected(*args, slots, slots + apart)
    forward(layer(step, latents, indexer), step, monkeypatch, named, {})
    assert torch.equal(latents.slab, want)


def test_layer_whose_indexer_has_no_slots_uses_one_mapping(scene, monkeypatch) -> None:
    step, _, _, slots, _ = scene
    latents, indexer = pages("dense", "fp8_ds_mla")
    want = expected(step, "fp8_ds_mla", latents, indexer, slots, slots)
    forward(layer(step, latents, indexer), step, monkeypatch, {"layer.attn": slots}, {})
    assert torch.equal(latents.slab, want)


def test_layer_without_indexer_writes_its_latents(scene, monkeypatch) -> None:
    step, latents, indexer, slots, _ = scene
    none = torch.full_like(slots, -1)
    want = expected(step, "fp8_ds_mla", latents, indexer, slots, none)
    stand_in = layer(step, latents, indexer, with_indexer=False)
    forward(stand_in, step, monkeypatch, {"layer.attn": slots}, {})
    assert torch.equal(latents.slab, want)
    assert not stand_in.topk_indices_buffer.any()


def test_layer_without_metadata_writes_nothing(scene, monkeypatch) -> None:
    step, latents, indexer, slots, apart = scene
    before = latents.slab.clone()
    named = {"layer.attn": slots, "layer.indexer.k_cache": slots + apart}
    forward(layer(step, latents, indexer), step, monkeypatch, named, None)
    assert torch.equal(latents.slab, before)


def test_kernel_compiles_for_hopper_and_blackwell_with_and_without_caches(
    tmp_path,
) -> None:
    environment = dict(os.environ, TRITON_CACHE_DIR=str(tmp_path))
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compile_fused_norm_rope.py")
    result = subprocess.run(
        [sys.executable, str(script), kernels.__file__],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("compiled") == 12
