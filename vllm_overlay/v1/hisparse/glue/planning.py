# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Memory planning: from vLLM's cache specs to pools, tensors and limits (D7, D14, D20).

Everything here is a pure function of the configuration and the specs, so the engine
core and every worker find the same plan.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.mem_constants import GiB_bytes
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    may_override_num_blocks,
)
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    replace_as,
)

from ..capacity import HotSizes, Limits, PoolPlan, plan_pools, pool_bytes
from ..layout import DevicePlan, IndexerLayer, LatentLayer, plan_device
from ..report import startup_line
from ..settings import refusal
from .config import check_block_size, hot_rows, settings_of
from .spec import HiSparseKVCacheConfig, HiSparsePageSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

INDEXER_NAME_PART = ".indexer."


# -- the plan --------------------------------------------------------------------------


def device_plan(groups: Sequence[KVCacheGroupSpec]) -> DevicePlan:
    """Geometry for the cache groups that vLLM made of the model's layers.

    Raises:
        ValueError: there are other caches than those of DSA layers, or their rows or
            pages cannot be packed.
    """
    specs = _dsa_specs(groups)
    block_sizes = {spec.block_size for spec in specs.values()}
    assert len(block_sizes) == 1, block_sizes
    block_size = block_sizes.pop()
    check_block_size(block_size)
    latents, indexers = [], []
    for name in sorted(specs, key=extract_layer_index):
        token_bytes = specs[name].page_size_bytes // block_size
        layer = extract_layer_index(name)
        if INDEXER_NAME_PART in name:
            indexers.append(IndexerLayer(name, layer, token_bytes))
        else:
            latents.append(LatentLayer(name, layer, token_bytes))
    return plan_device(latents, indexers, block_size)


def pool_plan(
    vllm_config: "VllmConfig", device: DevicePlan, num_blocks: int
) -> PoolPlan:
    """Plan for a device pool of `num_blocks` blocks."""
    return plan_pools(
        device,
        _hot_sizes(vllm_config, device),
        _limits(vllm_config),
        num_blocks,
        settings_of(vllm_config).host_pool_bytes,
    )


def _dsa_specs(groups: Sequence[KVCacheGroupSpec]) -> Mapping[str, MLAAttentionSpec]:
    """Specs of all layers by name, latents and indexers.

    Raises:
        ValueError: a layer has a cache of another kind, or vLLM made several groups.
    """
    specs: dict[str, KVCacheSpec] = {}
    for group in groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            specs |= {name: spec.kv_cache_specs[name] for name in group.layer_names}
        else:
            specs |= dict.fromkeys(group.layer_names, spec)
    others = {
        name: type(spec).__name__
        for name, spec in specs.items()
        if type(spec) is not MLAAttentionSpec
        or spec.tokens_per_state != 1
        or spec.num_heads != 1
        or spec.page_size_padded is not None
    }
    if others or len(groups) != 1:
        name, kind = next(iter(others.items()), ("", ""))
        raise refusal(
            "the KV cache of the model and its drafter (speculative_config.method)",
            f"{len(groups)} groups, with {len(others)} layers that are not plain MLA "
            "caches" + (f" (first: {name}, {kind})" if others else ""),
            "one group of MLA latents and their indexers",
            "draft with layers that have them (method mtp), or serve without HiSparse",
        )
    return specs  # type: ignore[return-value]


def _hot_sizes(vllm_config: "VllmConfig", device: DevicePlan) -> HotSizes:
    settings = settings_of(vllm_config)
    return HotSizes(
        topk=settings.topk,
        hot_rows=hot_rows(settings.device_buffer_size, device.block_size),
        drafts=vllm_config.num_speculative_tokens,
    )


def _limits(vllm_config: "VllmConfig") -> Limits:
    decode_tokens = 1 + vllm_config.num_speculative_tokens
    return Limits(
        max_model_len=vllm_config.model_config.max_model_len,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        window_tokens=vllm_config.max_in_flight_tokens,
        decode_tokens=vllm_config.max_concurrent_batches * decode_tokens
        + vllm_config.num_lookahead_tokens,
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
    )


def _num_ranks(vllm_config: "VllmConfig") -> int:
    """Workers of one replica; pipeline and context parallelism are refused."""
    return vllm_config.parallel_config.tensor_parallel_size


# -- hooks of kv_cache_utils -----------------------------------------------------------


def kv_cache_config(
    vllm_config: "VllmConfig", groups: list[KVCacheGroupSpec], available_memory: int
) -> KVCacheConfig:
    """Configuration of one worker: strided tensors over one slab (D7).

    Args:
        vllm_config: configuration with HiSparse on.
        groups: vLLM's groups, passed on unchanged.
        available_memory: bytes of the device pool, bookkeeping already taken off.
            `num_gpu_blocks_override` counts blocks of the device pool and wins.
    """
    device = device_plan(groups)
    num_blocks = may_override_num_blocks(
        vllm_config, available_memory // device.block_bytes
    )
    return HiSparseKVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=kv_cache_tensors(device, num_blocks),
        kv_cache_groups=groups,
        prefix_cache_retention_interval=(
            vllm_config.cache_config.prefix_cache_retention_interval
        ),
        plan=pool_plan(vllm_config, device, num_blocks),
        num_ranks=_num_ranks(vllm_config),
        transfer_timeout_s=settings_of(vllm_config).transfer_timeout_s,
    )


def kv_cache_tensors(device: DevicePlan, num_blocks: int) -> list[KVCacheTensor]:
    """One tensor for the indexers and one for each stack, over the same bytes.

    All start at byte 0: a block belongs to one frame column or lease at a time, and
    only that one's layers use it.
    """
    stacks = [
        ([p.name for p in device.indexers], device.indexer_page_bytes),
        *(
            ([p.name for p in device.stack_latents(g)], device.latent_page_bytes)
            for g in range(device.num_stacks)
        ),
    ]
    return [
        KVCacheTensor(
            size=num_blocks * device.block_bytes,
            layers=layers,
            layer_stride=page_bytes,
            block_stride=device.block_bytes,
        )
        for layers, page_bytes in stacks
    ]


def kv_cache_configs(
    vllm_config: "VllmConfig",
    kv_cache_specs: list[dict[str, KVCacheSpec]],
    available_memory: list[int],
) -> list[KVCacheConfig]:
    """Configurations of all workers, with as many blocks as the smallest can have.

    Lowers `max_model_len` where the user asked for the largest that fits.

    Raises:
        ValueError: a pool is too small for one request of `max_model_len` tokens, or
            the model cannot be planned for.
    """
    specs = kv_cache_specs[0]
    assert all(other == specs for other in kv_cache_specs[1:]), (
        "KV cache specs differ between workers, without pipeline parallelism"
    )
    groups = get_kv_cache_groups(vllm_config, specs)
    device = device_plan(groups)
    hot = _hot_sizes(vllm_config, device)
    room = pool_bytes(device, hot, _limits(vllm_config), min(available_memory))
    num_blocks = may_override_num_blocks(vllm_config, room // device.block_bytes)
    if vllm_config.model_config.original_max_model_len == -1:
        _auto_fit(vllm_config, device, num_blocks)
    pools = pool_plan(vllm_config, device, num_blocks)
    _check_device_pool(vllm_config, pools, min(available_memory))
    _check_host_pool(vllm_config, pools)
    return [
        get_kv_cache_config_from_groups(
            vllm_config, deepcopy(groups), pools.device_bytes
        )
        for _ in kv_cache_specs
    ]


def scheduler_kv_cache_config(worker: KVCacheConfig) -> KVCacheConfig:
    """The scheduler's copy: host pages, and the spec that selects the manager (D6)."""
    assert isinstance(worker, HiSparseKVCacheConfig)
    plan = worker.plan
    assert plan is not None
    config = deepcopy(worker)
    config.num_blocks = plan.num_pages
    (group,) = config.kv_cache_groups
    group.kv_cache_spec = replace_as(
        _dsa_specs([group])[plan.device.latents[0].name],
        HiSparsePageSpec,
        plan=plan,
        num_ranks=worker.num_ranks,
        transfer_timeout_s=worker.transfer_timeout_s,
    )
    return config


def max_concurrency(vllm_config: "VllmConfig", config: KVCacheConfig) -> float:
    """Decoding requests of `max_model_len` tokens that both pools hold."""
    assert isinstance(config, HiSparseKVCacheConfig) and config.plan is not None
    tokens = vllm_config.model_config.max_model_len
    host = config.plan.host_tokens / tokens
    return min(config.plan.steady_concurrency(tokens), host)


def record_capacity(vllm_config: "VllmConfig", config: KVCacheConfig) -> None:
    """Store what the device holds, and log the start-up line (D32)."""
    assert isinstance(config, HiSparseKVCacheConfig)
    pools = config.plan
    assert pools is not None
    vllm_config.cache_config.kv_cache_size_tokens = pools.device_tokens
    vllm_config.cache_config.kv_cache_max_concurrency = max_concurrency(
        vllm_config, config
    )
    logger.info_once("%s", startup_line(pools, config.num_ranks))
    _warn_of_useless_leases(pools)
    if pools.host_tokens < pools.device_tokens:
        logger.warning_once(
            "HiSparse: the host pool holds %s tokens and the device pool %s: the "
            "device can never be full. Give a host_pool_gib of %.2f or more.",
            f"{pools.host_tokens:,}",
            f"{pools.device_tokens:,}",
            _gib_for(pools, pools.device_tokens),
        )


def _warn_of_useless_leases(pools: PoolPlan) -> None:
    """Say when no request can ever give pages away (D12)."""
    longest = min(pools.limits.max_model_len, pools.host_tokens)
    whole = min(pools.resident_blocks(longest), pools.usable_blocks)
    if pools.lease_blocks < whole:
        return
    logger.warning_once(
        "HiSparse: a hot lease is %s blocks and a request has at most %s on the "
        "device: no page will live on the host only. Lower "
        "hisparse_config.device_buffer_size, or raise --max-model-len or the memory.",
        f"{pools.lease_blocks:,}",
        f"{whole:,}",
    )


# -- limits ----------------------------------------------------------------------------


def _auto_fit(vllm_config: "VllmConfig", device: DevicePlan, num_blocks: int) -> None:
    """Set `max_model_len` to the longest request that both pools hold."""
    model = vllm_config.model_config
    longest = model.max_model_len

    def fits(tokens: int) -> bool:
        model.max_model_len = tokens
        pools = pool_plan(vllm_config, device, num_blocks)
        needed = pools.admission_blocks(tokens)
        return needed <= pools.usable_blocks and tokens <= pools.host_tokens

    # Largest length that fits, between a known good and a known bad one.
    good, bad = 0, longest + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    model.max_model_len = good or longest
    if good != longest:
        logger.info_once("Auto-fit max_model_len: reduced from %d to %d", longest, good)


def _check_device_pool(
    vllm_config: "VllmConfig", pools: PoolPlan, available_memory: int
) -> None:
    tokens = pools.limits.max_model_len
    needed = pools.admission_blocks(tokens)
    if needed <= pools.usable_blocks:
        return
    need = (
        f"{needed + 1:,} blocks, with the null block: {pools.steady_blocks(tokens):,} "
        f"for one request of max_model_len {tokens:,} tokens, of which "
        f"{pools.lease_blocks:,} are its hot lease, and up to "
        f"{pools.window_blocks:,} for {pools.limits.window_tokens:,} tokens in flight"
    )
    remedy = (
        "lower --max-model-len, --max-num-batched-tokens or "
        "hisparse_config.device_buffer_size"
    )
    if vllm_config.cache_config.num_gpu_blocks_override is not None:
        raise ValueError(
            f"HiSparse: num_gpu_blocks_override is {pools.num_blocks:,} blocks of the "
            f"device pool ({pools.device.block_bytes:,} B each, "
            f"{pools.device.frame_blocks} for a resident page); allowed: at least "
            f"{need}. Remedy: raise it, or {remedy}."
        )
    wanted = (needed + 1) * pools.device.block_bytes
    raise ValueError(
        f"HiSparse: {available_memory / GiB_bytes:.2f} GiB of device memory give "
        f"{pools.num_blocks:,} blocks; allowed: at least {need} "
        f"({wanted / GiB_bytes:.2f} GiB). Remedy: raise --gpu-memory-utilization, or "
        f"{remedy}."
    )


def _check_host_pool(vllm_config: "VllmConfig", pools: PoolPlan) -> None:
    tokens = pools.limits.max_model_len
    if pools.pages(tokens) > pools.num_pages - 1:
        least = _gib_for(pools, tokens)
        raise ValueError(
            "HiSparse: host_pool_gib is "
            f"{settings_of(vllm_config).host_pool_gib:g} GiB, which holds "
            f"{pools.host_tokens:,} tokens of {pools.device.ideal_token_bytes:,} B; "
            f"allowed: at least {least:.2f} GiB, for one request of "
            f"max_model_len {tokens:,} tokens. Remedy: raise host_pool_gib, or lower "
            "--max-model-len."
        )


def _gib_for(pools: PoolPlan, tokens: int) -> float:
    """`host_pool_gib` that holds `tokens` tokens, rounded up to 0.01."""
    pages = pools.pages(tokens) + 1
    wanted = pages * pools.device.host_page_bytes
    hundredths = -(-wanted * 100 // GiB_bytes)
    return hundredths / 100
