# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""GPU backends hand their kernels the rows that hold the selected positions (D27).

The kernels are stand-ins that read rows by each library's own convention. That the
libraries accept such views is for a GPU to show.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs the patched vLLM")

from vllm.v1.attention.backends.mla.sparse_utils import (  # noqa: E402
    flat_kv_row_view,
)
from vllm.v1.hisparse.glue import backends  # noqa: E402
from vllm.v1.hisparse.glue.worker import HiSparseLayer  # noqa: E402

from runtime_world import RuntimeWorld  # noqa: E402

HEADS = 2
LEADER, FOLLOWER = 0, 3
DECODE = {"mixed": 1, "full": 1, "cold": 1}
PREFILL = {"full": 1, "mixed": 6, "cold": 5}


def world_of(row_bytes: int) -> RuntimeWorld:
    # Indexers that need more than a page of latents: blocks have a gap behind it.
    world = RuntimeWorld(row_bytes=row_bytes, token_bytes=row_bytes)
    assert world.plan.device.rows_per_block > 16
    world.add("full", [True] * 12, leased=False)
    world.add("mixed", [page % 2 == 0 for page in range(12)], leased=True)
    world.add("cold", [False] * 11 + [True], leased=True)
    return world


def view_of(world: RuntimeWorld, layer: int, dtype: torch.dtype) -> torch.Tensor:
    """A layer's view of the pool as vLLM makes it: ``[blocks, 16, row]``, strided."""
    device = world.plan.device
    place = device.latents[layer]
    size = dtype.itemsize
    return torch.as_strided(
        world.slab.view(dtype),
        (world.plan.num_blocks, 16, device.row_bytes // size),
        (device.block_bytes // size, device.row_bytes // size, 1),
        place.byte_offset // size,
    )


def summed(q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What the stand-ins compute: exact, and different if any row or token is."""
    weights = 1 + torch.arange(rows.shape[1]).double()
    sums = (rows.view(torch.uint8).double() * weights[:, None]).sum(1)
    return q[..., :512].double() + sums[:, None, :512]


def by_flat_rows(flat: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    picked = flat[rows.clamp(min=0).long()].contiguous().view(torch.uint8).clone()
    picked[rows < 0] = 0
    return picked


class Run:
    """One layer of a backend over a world."""

    def __init__(self, impl, world, metadata, dtype=torch.bfloat16, layer=FOLLOWER):
        self.impl, self.world, self.metadata = impl, world, metadata
        self.cache, self.number = view_of(world, layer, dtype), layer
        tables = SimpleNamespace(batch=world.batch)
        stack = world.plan.device.latents[layer].stack
        hisparse = HiSparseLayer(world.layers[layer], tables, stack)
        self.layer = SimpleNamespace(hisparse=hisparse)
        self.stride = world.plan.device.rows_per_block
        impl.dcp_world_size = 1
        impl.num_heads, impl.kv_lora_rank = HEADS, 512

    def __call__(self, counts: dict[str, int], make_q) -> None:
        world = self.world
        world.start(counts)
        topk = world.draw(counts, 12).sort(1, descending=True).values
        q = torch.randn(len(topk), HEADS, 576, generator=world.random).bfloat16()
        self.impl.topk_indices_buffer = topk
        if self.number != LEADER:
            leader = world.layers[LEADER]
            leader.attend(world.batch, topk, self.stride, lambda t, r, v: r)
        out, lse = self.impl.forward_mqa(
            make_q(q), self.cache, self.metadata, self.layer
        )
        assert lse is None
        assert torch.equal(out.double(), summed(q, world.selected(self.number, topk)))


@pytest.fixture
def flashmla(monkeypatch: pytest.MonkeyPatch):
    from vllm.v1.attention.backends.mla import flashmla_sparse as module

    def make(kv_cache_dtype: str, layer: int = FOLLOWER, padded: int = HEADS) -> Run:
        is_fp8 = kv_cache_dtype == "fp8_ds_mla"
        world = world_of(656 if is_fp8 else 1152)
        impl = object.__new__(module.FlashMLASparseImpl)
        impl.kv_cache_dtype = kv_cache_dtype
        impl.prefill_padding, impl.fp8_decode_padded_heads = padded, padded
        impl.q_concat_buffer = torch.zeros(
            256, HEADS if is_fp8 else padded, 576
        ).bfloat16()
        impl.softmax_scale, impl.need_to_return_lse_for_decode = 1.0, False
        planned = module.FlashMLASparseMetadata.FP8KernelMetadata("step", None, None)
        metadata = SimpleNamespace(
            block_size=16, fp8_extra_metadata=planned, fp8_use_mixed_batch=True
        )
        dtype = torch.uint8 if is_fp8 else torch.bfloat16
        run = Run(impl, world, metadata, dtype, layer)
        if is_fp8:
            # Its kernel numbers rows by 16 in every block, whatever the stride.
            run.stride = 16
        return run

    def bf16_kernel(q, kv, rows, scale, topk_length):
        assert torch.equal(topk_length, (rows >= 0).sum((1, 2)).int())
        out = summed(q, by_flat_rows(kv.squeeze(1), rows.squeeze(1)))
        return out, None, torch.zeros(len(q), q.shape[1])

    plans: list = []

    def fp8_kernel(q, k_cache, indices, tile_scheduler_metadata, **_):
        plans.append((tile_scheduler_metadata, q.shape[1]))
        rows = indices[0]
        safe = rows.clamp(min=0).long()
        picked = k_cache[safe // 16, safe % 16, 0].clone()
        picked[rows < 0] = 0
        return summed(q[0], picked).unsqueeze(0), torch.zeros(1, HEADS, len(rows))

    def concat(nope, rope, q):
        q[:, : nope.shape[1]] = torch.cat([nope, rope], dim=-1)

    monkeypatch.setattr(module.ops, "concat_mla_q", concat)
    monkeypatch.setattr(module, "flash_mla_sparse_fwd", bf16_kernel)
    monkeypatch.setattr(module, "flash_mla_with_kvcache", fp8_kernel)
    fresh = iter(range(10**6))
    monkeypatch.setattr(backends, "get_mla_metadata", lambda: (next(fresh), None))
    return SimpleNamespace(make=make, plans=plans)


@pytest.mark.parametrize("counts", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8_ds_mla"])
@pytest.mark.parametrize("layer", [LEADER, FOLLOWER], ids=["leader", "follower"])
def test_flashmla_reads_the_selected_rows(
    flashmla, kv_cache_dtype, layer, counts
) -> None:
    flashmla.make(kv_cache_dtype, layer)(counts, lambda q: q)


@pytest.mark.parametrize("counts", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8_ds_mla"])
def test_flashmla_gives_no_padded_heads(flashmla, kv_cache_dtype, counts) -> None:
    """Its kernels take 64 heads or more; a rank has fewer, in two tensors."""
    run = flashmla.make(kv_cache_dtype, padded=4 * HEADS)
    run(counts, lambda q: (q[..., :512], q[..., 512:]))


def test_flashmla_plans_anew_for_a_part_of_the_tokens(flashmla) -> None:
    run = flashmla.make("fp8_ds_mla")
    run(DECODE, lambda q: q)
    assert flashmla.plans == [("step", 3)]
    run(PREFILL, lambda q: q)
    assert flashmla.plans[1:] == [(0, 1), (1, 11)]


@pytest.mark.parametrize("counts", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_flashinfer_reads_the_selected_rows(monkeypatch, counts) -> None:
    from vllm.v1.attention.backends.mla import flashinfer_mla_sparse as module

    def kernel(query, kv_cache, block_tables, seq_lens, **_):
        rows = block_tables.squeeze(1)
        assert torch.equal(seq_lens, (rows >= 0).sum(1).int())
        flat, stride = flat_kv_row_view(kv_cache.squeeze(1), 16)
        assert stride == run.stride
        return summed(query.squeeze(1), by_flat_rows(flat, rows))

    library = ModuleType("flashinfer.decode")
    name = "trtllm_batch_decode_with_kv_cache_mla"
    monkeypatch.setattr(library, name, kernel, raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.decode", library)
    world = world_of(1152)
    impl = object.__new__(module.FlashInferMLASparseImpl)
    impl._workspace_buffer, impl.bmm1_scale, impl.bmm2_scale = 0, 1.0, 1.0
    impl.qk_nope_head_dim, impl.qk_rope_head_dim = 192, 64
    impl.need_to_return_lse_for_decode = False
    metadata = SimpleNamespace(block_size=16, topk_tokens=32)
    run = Run(impl, world, metadata)
    run(counts, lambda q: q)


@pytest.mark.parametrize("counts", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_flash_attention_reads_the_selected_rows(monkeypatch, counts) -> None:
    name = "vllm.vllm_flash_attn.flash_attn_interface"
    library = ModuleType(name)
    monkeypatch.setattr(library, "flash_attn_varlen_func", None, raising=False)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", ModuleType("stand-in"))
    monkeypatch.setitem(sys.modules, name, library)
    backend = "vllm.v1.attention.backends.mla.flashattn_mla_sparse"
    monkeypatch.delitem(sys.modules, backend, raising=False)
    import importlib

    module = importlib.import_module(backend)

    def kernel(q, k, v, q_v, seqused_k, block_table, **_):
        rows = block_table
        assert torch.equal(seqused_k, (rows >= 0).sum(1).int())
        flat = torch.cat([v[:, 0, 0], k[:, 0, 0]], dim=-1)
        return summed(torch.cat([q_v, q], dim=-1), by_flat_rows(flat, rows))

    monkeypatch.setattr(module, "flash_attn_varlen_func", kernel)
    world = world_of(1152)
    impl = object.__new__(module.FlashAttnMLASparseImpl)
    impl.scale = 1.0
    metadata = SimpleNamespace(block_size=16)
    run = Run(impl, world, metadata)
    run(counts, lambda q: (q[..., :512], q[..., 512:]))


def test_a_backend_that_does_not_ask_for_rows_is_refused() -> None:
    def layer(name):
        return SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: name))

    backends.check_backends([layer("CPU_MLA_SPARSE"), layer("FLASHMLA_SPARSE")])
    with pytest.raises(ValueError, match="attention backend is XPU_MLA_SPARSE; allo"):
        backends.check_backends([layer("CPU_MLA_SPARSE"), layer("XPU_MLA_SPARSE")])


def test_a_dense_prefill_gathers_by_its_own_stack() -> None:
    """Table rows of the batch's prefills; what others read is unchanged."""
    world = world_of(128)
    world.start({"mixed": 1, "full": 4})
    own = torch.zeros(2, 12, dtype=torch.int32)
    world.tables.stack_table(world.batch, 2, own)
    frames = world.tables.residency.page_frame[0, :12].long()
    want = world.tables.residency.frame_blocks[frames, 3]
    assert torch.equal(own[1], want) and (want > 0).all()
    # Host-only pages are nowhere, and a padded request has no blocks.
    assert (own[0, 1::2] == 0).all() and (own[0, ::2] > 0).all()
    world.batch.set_requests(torch.tensor([1]), 2)
    world.tables.stack_table(world.batch, 2, own)
    assert (own[1] == 0).all()
    table = torch.full((2, 12), 7)
    metadata = SimpleNamespace(
        num_decodes=1, prefill=SimpleNamespace(block_table=table)
    )
    changed = backends.with_block_table(metadata, own)
    assert torch.equal(changed.prefill.block_table, own[1:])
    assert metadata.prefill.block_table is table
