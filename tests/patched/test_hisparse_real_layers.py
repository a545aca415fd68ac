# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The plan for the layers that vLLM really builds, drafter included (D7)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the patched vLLM")

import torch  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import (  # noqa: E402
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.model_loader import get_model  # noqa: E402
from vllm.utils.network_utils import get_open_port  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs  # noqa: E402
from vllm.v1.hisparse.glue import config as glue_config  # noqa: E402
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec  # noqa: E402
from vllm.v1.worker.utils import allocate_kv_cache  # noqa: E402

from hisparse_configs import make_config, transfer, write_model  # noqa: E402

# (latents, indexers, R, G) of the tiny GLM with its MTP layer.
EXPECTED = {
    ("float32", "auto", 16): (2_304, 36_864, 1, 7),
    ("bfloat16", "auto", 64): (1_152, 73_728, 1, 7),
    ("bfloat16", "fp8_ds_mla", 64): (656, 41_984, 1, 7),
}


@pytest.fixture
def one_process() -> Iterator[None]:
    yield
    cleanup_dist_env_and_memory()


def build_layers(config: VllmConfig) -> None:
    """Build target and drafter, so that their layers register themselves."""
    address = f"tcp://127.0.0.1:{get_open_port()}"
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, address, 0, "gloo")
        initialize_model_parallel(1, 1)
        get_model(vllm_config=config)
        draft = config.speculative_config.draft_model_config
        get_model(vllm_config=config, model_config=draft)


@pytest.mark.parametrize("dtype, cache_dtype, block_size", list(EXPECTED))
def test_views_of_the_tiny_glm(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    one_process: None,
    dtype: str,
    cache_dtype: str,
    block_size: int,
) -> None:
    monkeypatch.setattr(glue_config, "available_ram_bytes", lambda: None)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    config = make_config(
        write_model(tmp_path),
        kv=transfer(0.25),
        drafts=1,
        dtype=dtype,
        kv_cache_dtype=cache_dtype,
        block_size=block_size,
        load_format="dummy",
        num_gpu_blocks_override=600,
    )
    config.cache_config.kv_cache_layout = "LBHNC"
    build_layers(config)
    (worker,) = get_kv_cache_configs(config, [get_kv_cache_spec(config)], [1 << 20])
    device = worker.plan.device
    row_bytes, block_bytes, *shape = EXPECTED[dtype, cache_dtype, block_size]
    assert (device.row_bytes, device.block_bytes) == (row_bytes, block_bytes)
    assert [device.layers_per_stack, device.num_stacks] == shape
    assert [place.layer for place in device.latents] == list(range(7))
    assert [place.layer for place in device.indexers] == [0, 1, 5, 6]
    assert [unit.latents for unit in device.units] == [(0,), (1, 2, 3, 4), (5,), (6,)]

    caches = allocate_kv_cache(
        worker, torch.device("cpu"), KVCacheLayout.LBHNC, [block_size]
    )
    storages = {view.untyped_storage().data_ptr() for view in caches.values()}
    assert len(storages) == 1 and len(caches) == 11
    for places, token_bytes in (
        (device.latents, device.row_bytes),
        (device.indexers, device.indexer_token_bytes),
    ):
        for place in places:
            view = caches[place.name]
            size = view.element_size()
            assert view.shape == (600, 1, block_size, token_bytes // size)
            assert view.stride(0) * size == device.block_bytes
            assert view.stride(2) * size == token_bytes
            assert view.stride(3) == 1
            assert view.storage_offset() * size == place.byte_offset
