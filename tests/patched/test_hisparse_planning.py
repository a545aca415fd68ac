# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Memory planning in vLLM: tensors, block counts, limits, start-up (D6, D7, D14)."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the patched vLLM")

import torch  # noqa: E402
from vllm.config import VllmConfig  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    generate_scheduler_kv_cache_config,
    get_kv_cache_capacity,
    get_kv_cache_config_from_groups,
    get_kv_cache_configs,
    get_kv_cache_groups,
    update_kv_cache_capacity,
)
from vllm.v1.hisparse.capacity import PoolPlan  # noqa: E402
from vllm.v1.hisparse.glue import config as glue_config  # noqa: E402
from vllm.v1.hisparse.glue import planning  # noqa: E402
from vllm.v1.hisparse.glue.spec import HiSparsePageSpec  # noqa: E402
from vllm.v1.hisparse.report import startup_line  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402
from vllm.v1.worker.utils import allocate_kv_cache  # noqa: E402

from hisparse_configs import (  # noqa: E402
    GLM,
    dsa_specs,
    glm_specs,
    make_config,
    transfer,
    write_model,
)

GIB = 1 << 30
TINY_LEADERS = [0, 1, 5, 6]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("glm"), GLM)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glue_config, "available_ram_bytes", lambda: 4_000 * GIB)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


def tiny_specs(block_size: int = 16) -> dict[str, KVCacheSpec]:
    """Seven fp32 latents and four indexers."""
    return dsa_specs(7, TINY_LEADERS, block_size, torch.float32, "auto")


def on(model: str, pool: float = 0.25, **args: Any) -> VllmConfig:
    """HiSparse on, layout resolved, 16 tokens a page unless given."""
    config = make_config(model, kv=transfer(pool), **({"block_size": 16} | args))
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def glm_config(model: str, **args: Any) -> VllmConfig:
    """GLM-5.3 at TP 8 with MTP 3."""
    defaults: dict[str, Any] = {
        "pool": 384,
        "drafts": 3,
        "max_model_len": 83_000,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8_192,
        "dtype": "bfloat16",
        "block_size": 64,
    }
    config = on(model, **(defaults | args))
    config.parallel_config.tensor_parallel_size = 8
    config.parallel_config.world_size = 8
    config.scheduler_config.async_scheduling = True
    return config


def plan_of(config: KVCacheConfig) -> PoolPlan:
    plan = config.plan  # type: ignore[attr-defined]
    assert isinstance(plan, PoolPlan)
    return plan


def configs(config: VllmConfig, specs: dict[str, KVCacheSpec], *memory: int) -> Any:
    return get_kv_cache_configs(config, [dict(specs) for _ in memory], list(memory))


class TestWorkerConfig:
    def test_one_group_with_plain_specs_and_device_blocks(self, tiny: str) -> None:
        config = on(tiny)
        specs = tiny_specs()
        (worker,) = configs(config, specs, 64 << 20)
        (group,) = worker.kv_cache_groups
        assert type(group.kv_cache_spec) is UniformTypeKVCacheSpecs
        assert group.kv_cache_spec.kv_cache_specs == specs
        plan = plan_of(worker)
        assert worker.num_blocks == plan.num_blocks
        assert plan.num_blocks * plan.device.block_bytes <= 64 << 20

    def test_bookkeeping_is_set_aside_before_blocks_are_counted(
        self, tiny: str
    ) -> None:
        (worker,) = configs(on(tiny), tiny_specs(), 64 << 20)
        plan = plan_of(worker)
        assert plan.bookkeeping_bytes > 0
        assert plan.device_bytes + plan.bookkeeping_bytes <= 64 << 20
        assert worker.num_blocks < (64 << 20) // plan.device.block_bytes

    def test_workers_agree_on_the_smallest_pool(self, tiny: str) -> None:
        large, small = configs(on(tiny), tiny_specs(), 64 << 20, 48 << 20)
        (alone,) = configs(on(tiny), tiny_specs(), 48 << 20)
        assert large.num_blocks == small.num_blocks == alone.num_blocks
        assert large.kv_cache_tensors == small.kv_cache_tensors

    def test_a_worker_finds_the_same_plan_by_itself(self, tiny: str) -> None:
        config = on(tiny)
        (worker,) = configs(config, tiny_specs(), 64 << 20)
        sent = pickle.loads(pickle.dumps(config))
        groups = get_kv_cache_groups(sent, tiny_specs())
        plan = plan_of(worker)
        again = get_kv_cache_config_from_groups(sent, groups, plan.device_bytes)
        assert repr(again) == repr(worker)

    def test_graph_profiling_plans_a_few_blocks_without_memory(self, tiny: str) -> None:
        config = on(tiny)
        config.cache_config.num_gpu_blocks_override = 3
        groups = get_kv_cache_groups(config, tiny_specs())
        minimal = get_kv_cache_config_from_groups(config, groups, 0)
        assert minimal.num_blocks == 3
        assert plan_of(minimal).mixed_rows == 1

    def test_the_plan_travels_to_workers(self, tiny: str) -> None:
        (worker,) = configs(on(tiny), tiny_specs(), 64 << 20)
        assert plan_of(pickle.loads(pickle.dumps(worker))) == plan_of(worker)


def check_views(config: KVCacheConfig, caches: dict[str, torch.Tensor]) -> None:
    """Every layer's view has the strides and the offset of the plan."""
    device = plan_of(config).device
    for place in device.latents:
        view = caches[place.name]
        row = device.row_bytes // view.element_size()
        block = device.block_bytes // view.element_size()
        assert view.shape == (config.num_blocks, 1, device.block_size, row)
        assert (view.stride(0), view.stride(2), view.stride(3)) == (block, row, 1)
        assert view.storage_offset() * view.element_size() == place.byte_offset
    for place in device.indexers:
        view = caches[place.name]
        assert view.shape[0] == config.num_blocks
        assert view.stride(0) == device.block_bytes
        assert view.stride(2) == device.indexer_token_bytes
        assert view.storage_offset() == place.byte_offset


class TestViews:
    @pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
    @pytest.mark.parametrize("block_size", [16, 64])
    def test_layers_are_strided_views_of_one_slab(
        self, tiny: str, layout: str, block_size: int
    ) -> None:
        config = on(tiny, block_size=block_size)
        config.cache_config.num_gpu_blocks_override = 5
        groups = get_kv_cache_groups(config, tiny_specs(block_size))
        worker = get_kv_cache_config_from_groups(config, groups, 0)
        caches = allocate_kv_cache(
            worker, torch.device("cpu"), KVCacheLayout[layout], [block_size]
        )
        assert set(caches) == set(tiny_specs())
        assert len({view.untyped_storage().data_ptr() for view in caches.values()}) == 1
        slab = next(iter(caches.values())).untyped_storage()
        assert slab.nbytes() == plan_of(worker).device_bytes
        check_views(worker, caches)

    def test_layers_of_a_block_do_not_overlap(self, tiny: str) -> None:
        config = on(tiny)
        config.cache_config.num_gpu_blocks_override = 4
        groups = get_kv_cache_groups(config, tiny_specs())
        worker = get_kv_cache_config_from_groups(config, groups, 0)
        caches = allocate_kv_cache(worker, torch.device("cpu"), KVCacheLayout.LBHNC)
        device = plan_of(worker).device
        columns = [
            list(device.indexers),
            *(list(device.stack_latents(g)) for g in range(device.num_stacks)),
        ]
        for column in columns:
            for number, place in enumerate(column, 1):
                caches[place.name][2].view(torch.uint8).fill_(number)
            for number, place in enumerate(column, 1):
                page = caches[place.name][2].view(torch.uint8)
                assert (page == number).all()
            slab = torch.empty(0, dtype=torch.uint8)
            slab.set_(caches[column[0].name].untyped_storage())
            blocks = slab.view(worker.num_blocks, device.block_bytes)
            assert not blocks[[0, 1, 3]].any()
            blocks.zero_()

    def test_glm_layers_beyond_32_bits(self, glm: str) -> None:
        (worker,) = configs(glm_config(glm), glm_specs(), int(24.5 * GIB))
        plan = plan_of(worker)
        raw = torch.empty(plan.device_bytes, dtype=torch.int8, device="meta")
        (group,) = worker.kv_cache_groups
        caches: dict[str, torch.Tensor] = {}
        for tensor in worker.kv_cache_tensors:
            spec = group.kv_cache_spec.kv_cache_specs[tensor.layers[0]]
            views = create_kv_cache_views(
                raw, spec, worker.num_blocks, KVCacheLayout.LBHNC, tensor, 64
            )
            caches |= dict(zip(tensor.layers, views))
        assert len(caches) == 79 + 22
        assert [len(t.layers) for t in worker.kv_cache_tensors] == [22] + 15 * [5] + [4]
        assert {t.block_stride for t in worker.kv_cache_tensors} == {209_920}
        check_views(worker, caches)
        last = caches["model.layers.78.self_attn.attn"]
        end = last.storage_offset() + (last.shape[0] - 1) * last.stride(0)
        assert 2**31 < end < plan.device_bytes

    def test_rows_are_numbered_flat_over_blocks(self, tiny: str) -> None:
        config = on(tiny)
        config.cache_config.num_gpu_blocks_override = 4
        groups = get_kv_cache_groups(config, tiny_specs())
        worker = get_kv_cache_config_from_groups(config, groups, 0)
        caches = allocate_kv_cache(worker, torch.device("cpu"), KVCacheLayout.LBHNC)
        device = plan_of(worker).device
        for place in device.latents:
            view = caches[place.name].squeeze(1)
            view[3, 7] = 1.5
            rows = torch.as_strided(
                view,
                (3 * device.rows_per_block + device.block_size, view.shape[-1]),
                (view.shape[-1], 1),
            )
            assert (rows[3 * device.rows_per_block + 7] == 1.5).all()
            view.zero_()


class TestSchedulerConfig:
    def test_blocks_are_host_pages_of_our_spec(self, tiny: str) -> None:
        (worker,) = configs(on(tiny, 0.25), tiny_specs(), 64 << 20)
        scheduler = generate_scheduler_kv_cache_config([worker])
        plan = plan_of(worker)
        assert scheduler.num_blocks == plan.num_pages
        assert plan.num_pages == GIB // 4 // plan.device.host_page_bytes
        (group,) = scheduler.kv_cache_groups
        spec = group.kv_cache_spec
        assert type(spec) is HiSparsePageSpec
        assert (spec.plan, spec.num_ranks, spec.block_size) == (plan, 1, 16)
        # The worker's stays as it was, and nothing on the host is ever zeroed.
        assert worker.num_blocks == plan.num_blocks
        assert type(worker.kv_cache_groups[0].kv_cache_spec) is UniformTypeKVCacheSpecs
        assert not scheduler.needs_kv_cache_zeroing

    def test_ranks_share_the_host_pool(self, glm: str) -> None:
        workers = configs(glm_config(glm), glm_specs(), *[int(24.5 * GIB)] * 8)
        scheduler = generate_scheduler_kv_cache_config(workers)
        assert scheduler.num_blocks == 384 * GIB // 3_502_592
        assert scheduler.kv_cache_groups[0].kv_cache_spec.num_ranks == 8


class TestLimits:
    def test_a_million_tokens_start(self, glm: str) -> None:
        config = glm_config(glm, max_model_len=1_048_576, pool=125)
        (worker,) = configs(config, glm_specs(), int(17.8 * GIB))
        plan = plan_of(worker)
        assert plan.resident_blocks(1_048_576) > 3 * plan.num_blocks
        tokens, concurrency = get_kv_cache_capacity(config, worker)
        assert 2.2 < concurrency < 2.4
        assert tokens == int(concurrency * 1_048_576)

    def test_steady_state_concurrency_of_the_start_up_figure(self, glm: str) -> None:
        config = glm_config(glm)
        (worker,) = configs(config, glm_specs(), int(24.5 * GIB))
        plan = plan_of(worker)
        assert (plan.hot.hot_rows, plan.hot.overflow_rows) == (4_096, 4_096)
        assert plan.tail_pages == 2
        assert plan.steady_concurrency(83_000) >= 50

    def test_both_pools_limit_the_reported_concurrency(self, tiny: str) -> None:
        (worker,) = configs(on(tiny, 0.02), tiny_specs(), 64 << 20)
        plan = plan_of(worker)
        _, concurrency = get_kv_cache_capacity(on(tiny, 0.02), worker)
        assert concurrency == plan.host_tokens / 512 < plan.steady_concurrency(512)

    def test_window_is_what_may_be_in_flight(self, tiny: str) -> None:
        config = on(tiny, max_num_batched_tokens=160)
        config.scheduler_config.async_scheduling = True
        (worker,) = configs(config, tiny_specs(), 64 << 20)
        assert plan_of(worker).limits.window_tokens == 320
        assert plan_of(worker).window_blocks == 20 * plan_of(worker).device.frame_blocks

    def test_device_pool_too_small(self, tiny: str) -> None:
        with pytest.raises(ValueError) as error:
            configs(on(tiny), tiny_specs(), 2 << 20)
        for part in (
            "0.00 GiB",
            "blocks; allowed: at least",
            "Remedy: raise --gpu-mem",
        ):
            assert part in str(error.value)

    def test_override_counts_device_blocks(self, tiny: str) -> None:
        config = on(tiny, num_gpu_blocks_override=400)
        (worker,) = configs(config, tiny_specs(), 1 << 20)
        assert worker.num_blocks == plan_of(worker).num_blocks == 400

    def test_smallest_override(self, tiny: str) -> None:
        config = on(tiny, num_gpu_blocks_override=400)
        (worker,) = configs(config, tiny_specs(), 1 << 20)
        plan = plan_of(worker)
        least = plan.admission_blocks(512) + 1
        config.cache_config.num_gpu_blocks_override = least
        assert configs(config, tiny_specs(), 1 << 20)[0].num_blocks == least
        config.cache_config.num_gpu_blocks_override = least - 1
        with pytest.raises(ValueError) as error:
            configs(config, tiny_specs(), 1 << 20)
        for part in (
            f"num_gpu_blocks_override is {least - 1:,} blocks of the device pool",
            f"at least {least:,} blocks",
            f"{plan.lease_blocks:,} are its hot lease",
            f"{plan.window_blocks:,} for 128 tokens in flight",
        ):
            assert part in str(error.value), (part, str(error.value))

    def test_host_pool_smaller_than_one_request(self, tiny: str) -> None:
        with pytest.raises(ValueError) as error:
            configs(on(tiny, 0.001), tiny_specs(), 64 << 20)
        for part in ("0.001 GiB", "max_model_len 512 tokens", "at least 0.01 GiB"):
            assert part in str(error.value), (part, str(error.value))
        # ... and what it asks for is enough.
        assert configs(on(tiny, 0.01), tiny_specs(), 64 << 20)

    def test_ranks_need_no_more_of_the_host_than_one(self, glm: str) -> None:
        config = glm_config(glm, max_model_len=1_048_576, pool=50)
        with pytest.raises(ValueError) as error:
            configs(config, glm_specs(), *[int(24.5 * GIB)] * 8)
        for part in ("holds 980,864 tokens of 54,728 B; allowed", "at least 53.45 GiB"):
            assert part in str(error.value), (part, str(error.value))

    def test_auto_fit_finds_the_longest_request(self, tiny: str) -> None:
        config = on(tiny, num_gpu_blocks_override=250, max_model_len=-1)
        assert config.model_config.max_model_len == 4_096
        (worker,) = configs(config, tiny_specs(), 1 << 20)
        longest = config.model_config.max_model_len
        plan = plan_of(worker)
        assert plan.limits.max_model_len == longest < 4_096
        assert plan.admission_blocks(longest) <= plan.usable_blocks
        assert plan.admission_blocks(longest + 1) > plan.usable_blocks

    def test_auto_fit_stays_within_the_host_pool(self, tiny: str) -> None:
        config = on(tiny, 0.03, max_model_len=-1)
        (worker,) = configs(config, tiny_specs(), 1 << 30)
        assert config.model_config.max_model_len == plan_of(worker).host_tokens < 4_096


class TestRefusedCaches:
    def test_a_layer_of_another_kind(self, tiny: str) -> None:
        specs = tiny_specs()
        specs["draft.layers.0.attn"] = FullAttentionSpec(
            block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32
        )
        with pytest.raises(ValueError, match=r"1 layers .* not plain MLA caches"):
            configs(on(tiny), specs, 64 << 20)

    def test_a_compressed_latent(self, tiny: str) -> None:
        specs = tiny_specs()
        name = "model.layers.6.self_attn.attn"
        specs[name] = MLAAttentionSpec(
            block_size=16,
            num_kv_heads=1,
            head_size=576,
            head_size_v=0,
            dtype=torch.float32,
            tokens_per_state=4,
        )
        with pytest.raises(ValueError, match=f"first: {name}"):
            configs(on(tiny), specs, 64 << 20)

    def test_rows_that_are_not_aligned(self, tiny: str) -> None:
        specs = {
            name: MLAAttentionSpec(
                block_size=16,
                num_kv_heads=1,
                head_size=576 + 4 * ("indexer" not in name),
                head_size_v=0,
                dtype=torch.uint8,
            )
            for name in tiny_specs()
        }
        with pytest.raises(ValueError, match="latent rows of 580 bytes"):
            configs(on(tiny), specs, 64 << 20)

    def test_no_indexer(self, tiny: str) -> None:
        specs = {n: s for n, s in tiny_specs().items() if "indexer" not in n}
        with pytest.raises(ValueError, match="7 MLA latent layers and 0 indexer"):
            configs(on(tiny), specs, 64 << 20)


class TestStartUp:
    def line(self, glm: str) -> str:
        (worker,) = configs(glm_config(glm), glm_specs(), int(24.5 * GIB))
        return startup_line(plan_of(worker))

    def test_line_says_what_there_is_room_for(self, glm: str) -> None:
        (worker,) = configs(glm_config(glm), glm_specs(), int(24.5 * GIB))
        plan = plan_of(worker)
        line = startup_line(plan)
        for part in (
            f"device pool 23.82 GiB ({plan.num_blocks:,} blocks of 209,920 B",
            "16 stacks of 5 layers",
            f"{plan.device_tokens:,} resident tokens of 55,760 B (ideal 54,728 B)",
            f"host pool 384.00 GiB holds {plan.host_tokens:,} tokens of 54,728 B",
            "hot lease 1,088 blocks, 217.8 MiB (4,096 hot + 4,096 overflow rows)",
            f"{plan.mixed_rows} at once",
            "bookkeeping ",
            "steady-state concurrency at 83,000 tokens per request: 50.4x on the ",
            "48.6x while 16,384 prompt tokens are in flight",
        ):
            assert part in line, (part, line)
        assert "\n" not in line

    def test_the_line_says_that_ranks_share_the_host_pool(self, glm: str) -> None:
        (worker,) = configs(glm_config(glm), glm_specs(), int(24.5 * GIB))
        line = startup_line(plan_of(worker), num_ranks=8)
        assert "host pool 384.00 GiB, shared by the ranks of a node, holds" in line

    @pytest.mark.parametrize("rows, warns", [(4_096, False), (32_704, True)])
    def test_a_lease_that_frees_nothing_is_said(
        self, glm: str, monkeypatch: pytest.MonkeyPatch, rows: int, warns: bool
    ) -> None:
        said: list[str] = []
        monkeypatch.setattr(
            planning.logger, "warning_once", lambda t, *args: said.append(t % args)
        )
        (worker,) = configs(glm_config(glm), glm_specs(), int(24.5 * GIB))
        plan = plan_of(worker)
        sizes = replace(plan.hot, hot_rows=rows)
        limits = replace(plan.limits, max_model_len=30_000)
        planning._warn_of_useless_leases(replace(plan, hot=sizes, limits=limits))
        assert bool(said) == warns
        if warns:
            assert "no page will live on the host only" in said[0]

    def test_device_numbers_are_recorded_and_the_line_logged(
        self, tiny: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said: list[str] = []
        for name in ("info_once", "warning_once"):
            monkeypatch.setattr(
                planning.logger, name, lambda text, *args: said.append(text % args)
            )
        config = on(tiny, 0.25)
        (worker,) = configs(config, tiny_specs(), 64 << 20)
        plan = plan_of(worker)
        update_kv_cache_capacity(config, generate_scheduler_kv_cache_config([worker]))
        cache = config.cache_config
        assert cache.kv_cache_size_tokens == plan.device_tokens
        assert cache.kv_cache_max_concurrency == plan.steady_concurrency(512)
        assert said == [startup_line(plan)]

    def test_a_host_pool_smaller_than_the_device_pool_is_warned_of(
        self, tiny: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said: list[str] = []
        monkeypatch.setattr(
            planning.logger,
            "warning_once",
            lambda text, *args: said.append(text % args),
        )
        config = on(tiny, 0.02)
        (worker,) = configs(config, tiny_specs(), 64 << 20)
        plan = plan_of(worker)
        update_kv_cache_capacity(config, worker)
        (warning,) = said
        assert f"holds {plan.host_tokens:,} tokens" in warning
        assert f"the device pool {plan.device_tokens:,}" in warning


class TestOff:
    def test_configurations_are_those_of_plain_vllm(self, tiny: str) -> None:
        config = make_config(tiny, block_size=16)
        config.cache_config.kv_cache_layout = "LBHNC"
        workers = configs(config, tiny_specs(), 64 << 20, 48 << 20)
        scheduler = generate_scheduler_kv_cache_config(workers)
        recorded = Path(__file__).with_name("hisparse_off_configs.txt")
        found = [repr(c) for c in (*workers, scheduler)]
        found.append(repr(get_kv_cache_capacity(config, scheduler)))
        assert found == recorded.read_text().splitlines()
