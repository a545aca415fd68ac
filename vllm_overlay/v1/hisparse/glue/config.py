# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Settings of HiSparse in `VllmConfig`: read, check, refuse (D5, D20, D31).

`AttentionConfig.hisparse_config` holds what the user gave until `resolve` has run, and
`HiSparseSettings` afterwards. It is None exactly where HiSparse is off (R9).
"""

from typing import TYPE_CHECKING, Any

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON

from ..host_memory import available_ram_bytes, check_shared_memory
from ..layout import ROW_ALIGNMENT
from ..settings import (
    DEFAULT_TRANSFER_TIMEOUT_S,
    GIB,
    MAX_HOT_ROWS,
    MAX_SELECTED_ROWS,
    MOST_GIB,
    HiSparseSettings,
    positive_number,
    refusal,
)
from .connectors import absorbed_gib, host_pool, keep_ours

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

logger = init_logger(__name__)

CUDA_BLOCK_SIZE = 64
"""The only page of the indexer's and FlashMLA's CUDA kernels."""

_KEYS = (
    "device_buffer_size",
    "host_pool_gib",
    "transfer_timeout_s",
    "eager_host_mirror",
)

_CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla")

# Layouts whose pages are one run of bytes; the old names are aliases.
_LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "HND", "NHD")


def resolve(vllm_config: "VllmConfig") -> None:
    """Turn what the user gave into `HiSparseSettings`, or refuse it.

    Called at the end of `VllmConfig`'s initialisation where `hisparse_config` or a
    HiSparse connector is given. Adds the connector where only the pool is given. A
    configuration that is copied later is not checked again: the host pool may be
    allocated by then.

    Raises:
        ValueError: the configuration cannot work; nothing has been changed then.
    """
    given = vllm_config.attention_config.hisparse_config
    if isinstance(given, HiSparseSettings):
        return
    options = _options(given)
    transfer = vllm_config.kv_transfer_config
    setting, value = host_pool(options, transfer)
    topk = _topk(vllm_config)
    _check_platform()
    _check_runner(vllm_config)
    _check_parallelism(vllm_config)
    _check_engine(vllm_config)
    pool_gib, extra_gib = _host_pool_gib(setting, value), absorbed_gib(transfer)
    settings = HiSparseSettings(
        host_pool_gib=pool_gib + extra_gib,
        device_buffer_size=_device_buffer_size(
            options, topk, vllm_config.cache_config.block_size
        ),
        topk=topk,
        transfer_timeout_s=_transfer_timeout_s(options),
    )
    _check_memory(settings, setting, vllm_config.parallel_config)
    if "eager_host_mirror" in options:
        logger.info(
            "HiSparse: eager_host_mirror has no effect here: every full page is "
            "written to the host at once"
        )
    vllm_config.kv_transfer_config = keep_ours(transfer, pool_gib, extra_gib)
    vllm_config.attention_config.hisparse_config = settings


def settings_of(vllm_config: "VllmConfig") -> HiSparseSettings:
    """Settings of a configuration with HiSparse on."""
    settings = vllm_config.attention_config.hisparse_config
    assert isinstance(settings, HiSparseSettings), settings
    return settings


def check_block_size(block_size: int) -> None:
    """Refuse a page that the kernels of this platform cannot have."""
    if current_platform.is_cuda_alike():
        if block_size != CUDA_BLOCK_SIZE:
            raise refusal(
                "--block-size",
                block_size,
                str(CUDA_BLOCK_SIZE),
                "leave --block-size out",
            )
    elif block_size % ROW_ALIGNMENT:
        raise refusal(
            "--block-size",
            block_size,
            f"multiples of {ROW_ALIGNMENT}",
            "use --block-size 64",
        )


def hot_rows(device_buffer_size: int, block_size: int) -> int:
    """The hot buffer in whole blocks.

    Raises:
        ValueError: more rows than slots can be numbered.
    """
    rows = -(-device_buffer_size // block_size) * block_size
    if rows > MAX_HOT_ROWS:
        most = MAX_HOT_ROWS // block_size * block_size
        raise refusal(
            "hisparse_config.device_buffer_size",
            device_buffer_size,
            f"up to {most:,} in whole blocks of {block_size}",
            f"set it to {most} or less",
        )
    return rows


# -- what was given ------------------------------------------------------------------


def _options(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise refusal(
            "hisparse_config",
            repr(given),
            "a JSON object",
            "write --attention-config '{\"hisparse_config\": {...}}'",
        )
    unknown = sorted(map(repr, set(given) - set(_KEYS)))
    if unknown:
        raise refusal(
            "hisparse_config",
            f"given with {', '.join(unknown)}",
            ", ".join(_KEYS),
            "correct or remove the key",
        )
    return given


# -- refusals ------------------------------------------------------------------------


def _check_platform() -> None:
    """Refuse platforms without an attention backend that resolves rows (D27).

    Which backend it is, is checked when the layers have theirs.
    """
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        raise refusal(
            "the platform",
            current_platform.device_name,
            "CUDA, or the CPU for tests",
            "serve without HiSparse on this machine",
        )


def _check_runner(vllm_config: "VllmConfig") -> None:
    if not vllm_config.use_v2_model_runner:
        reasons = vllm_config._get_v2_model_runner_unsupported_features()
        remedy = "unset VLLM_USE_V2_MODEL_RUNNER, and switch off what needs V1"
        if not HAS_TRITON:
            reasons = ["Triton is not available"]
            remedy = "install Triton; on the CPU also set TRITON_INTERPRET=1"
        raise refusal(
            "the model runner",
            f"V1 ({', '.join(reasons) or 'VLLM_USE_V2_MODEL_RUNNER=0'})",
            "V2",
            remedy,
        )
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise refusal(
            "the hybrid KV cache manager",
            "off",
            "on",
            "remove --disable-hybrid-kv-cache-manager",
        )


def _check_parallelism(vllm_config: "VllmConfig") -> None:
    parallel = vllm_config.parallel_config
    for flag, size in (
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            raise refusal(flag, size, "1", "use tensor or data parallelism instead")
    backend = parallel.distributed_executor_backend
    if backend == "external_launcher" and parallel.tensor_parallel_size > 1:
        raise refusal(
            "--distributed-executor-backend",
            backend,
            "mp, ray, with several tensor-parallel ranks",
            "choose one of these: every rank would have a scheduler of its own, which "
            "hears of no other rank's copies",
        )


def _check_engine(vllm_config: "VllmConfig") -> None:
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode is not None and mode.name == "FULL":
        raise refusal(
            "cudagraph_mode",
            "FULL",
            "FULL_AND_PIECEWISE, FULL_DECODE_ONLY, PIECEWISE, NONE",
            "use FULL_AND_PIECEWISE",
        )
    if vllm_config.model_config.enable_sleep_mode:
        raise refusal(
            "--enable-sleep-mode",
            "on",
            "off",
            "remove it: a sleeping engine drops device memory that the host pool's "
            "bookkeeping still refers to",
        )
    if vllm_config.model_config.enable_return_routed_experts:
        raise refusal(
            "--enable-return-routed-experts",
            "on",
            "off",
            "remove it: the scheduler looks experts up by host pages, the workers "
            "report them by device blocks",
        )
    drafts = vllm_config.speculative_config
    if drafts is not None and drafts.enable_adaptive_verification:
        raise refusal(
            "enable_adaptive_verification",
            "on",
            "off",
            "remove it from --speculative-config: it moves the requests' query rows "
            "on the device, where the host does not see them",
        )
    dtype = vllm_config.cache_config.cache_dtype
    if dtype not in _CACHE_DTYPES:
        raise refusal(
            "--kv-cache-dtype",
            dtype,
            ", ".join(_CACHE_DTYPES),
            "use fp8, or leave it out",
        )
    layout = envs.VLLM_KV_CACHE_LAYOUT
    if layout is not None and layout not in _LAYOUTS:
        raise refusal(
            "VLLM_KV_CACHE_LAYOUT", layout, ", ".join(_LAYOUTS), "unset the variable"
        )
    if vllm_config.cache_config.user_specified_block_size:
        check_block_size(vllm_config.cache_config.block_size)


def _topk(vllm_config: "VllmConfig") -> int:
    model = vllm_config.model_config
    topk = model and getattr(model.hf_text_config, "index_topk", None)
    if not topk:
        raise refusal(
            "index_topk of the model",
            "missing" if topk is None else topk,
            "1 or more",
            "serve a DeepSeek sparse attention model (GLM-5, DeepSeek V3.2), or "
            "remove the HiSparse settings",
        )
    query_rows = 1 + vllm_config.num_speculative_tokens
    if query_rows * topk > MAX_SELECTED_ROWS:
        raise refusal(
            "num_speculative_tokens",
            f"{query_rows - 1}, which with top-k {topk} selects "
            f"{query_rows * topk:,} rows a step",
            f"up to {MAX_SELECTED_ROWS // topk - 1}",
            "draft fewer tokens",
        )
    return topk


def _device_buffer_size(
    options: dict[str, Any], topk: int, block_size: int | None
) -> int:
    size = options.get("device_buffer_size")
    if size is None:
        size = 2 * topk
    if type(size) is not int or not topk <= size <= MAX_HOT_ROWS:
        raise refusal(
            "hisparse_config.device_buffer_size",
            repr(size),
            f"whole numbers from {topk} (the model's top-k) to {MAX_HOT_ROWS:,}",
            f"leave it out for the default, {2 * topk}",
        )
    if block_size is None:
        return size
    rows = hot_rows(size, block_size)
    if rows != size:
        logger.warning(
            "HiSparse: device_buffer_size %d is not a multiple of the block size %d; "
            "%d is used",
            size,
            block_size,
            rows,
        )
    return rows


def _host_pool_gib(setting: str, value: Any) -> float:
    remedy = "set it to the main memory that the host pool may take"
    return positive_number(setting, value, "GiB", remedy, MOST_GIB)


def _transfer_timeout_s(options: dict[str, Any]) -> float:
    return positive_number(
        "hisparse_config.transfer_timeout_s",
        options.get("transfer_timeout_s", DEFAULT_TRANSFER_TIMEOUT_S),
        "seconds",
        f"leave it out for the default, {DEFAULT_TRANSFER_TIMEOUT_S:g}",
    )


def _check_memory(
    settings: HiSparseSettings, setting: str, parallel: "ParallelConfig"
) -> None:
    # Every data-parallel replica of this node has a pool of its own.
    pools = max(1, parallel.data_parallel_size_local)
    wanted = settings.host_pool_bytes * pools
    each = f" for each of {pools} replicas" if pools > 1 else ""
    available = available_ram_bytes()
    if available is not None and wanted > available:
        raise refusal(
            setting,
            f"{settings.host_pool_gib:g} GiB{each}, {wanted / GIB:.2f} GiB in all",
            f"up to the available main memory, {available / GIB:.2f} GiB",
            "make the pool smaller, or free main memory",
        )
    if parallel.tensor_parallel_size > parallel.nnodes_within_dp:
        # vLLM's message queues and NCCL lie there as well.
        check_shared_memory(setting, wanted, reserve=min(GIB, wanted))
