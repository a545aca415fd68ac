# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""HiSparse's settings: what is accepted, what is refused and how (D5, D20, D31)."""

import copy
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the patched vLLM")

from vllm.config import ParallelConfig, VllmConfig, replace  # noqa: E402
from vllm.config.compilation import CUDAGraphMode  # noqa: E402
from vllm.v1.hisparse.glue import config as glue  # noqa: E402
from vllm.v1.hisparse.settings import HiSparseSettings  # noqa: E402

from hisparse_configs import (  # noqa: E402
    NAME,
    TINY_TOPK,
    make_config,
    multi,
    transfer,
    write_model,
)

GIB = 1 << 30
OFFLOAD = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": GIB},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glue, "available_ram_bytes", lambda: 1_000 * GIB)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


def settings(config: VllmConfig) -> HiSparseSettings:
    found = config.attention_config.hisparse_config
    assert isinstance(found, HiSparseSettings)
    return found


def refuse(model: str, *parts: str, **args: Any) -> str:
    """Start with `args`; the refusal must contain every part."""
    with pytest.raises(ValueError) as error:
        make_config(model, **args)
    text = str(error.value)
    for part in (*parts, "HiSparse", "allowed: ", "Remedy: "):
        assert part in text, (part, text)
    return text


class TestSpellings:
    def test_connector_alone(self, model: str) -> None:
        config = make_config(model, kv=transfer(0.5))
        assert settings(config) == HiSparseSettings(0.5, 2 * TINY_TOPK, TINY_TOPK)
        assert config.kv_transfer_config.kv_connector == NAME
        assert not config.scheduler_config.disable_hybrid_kv_cache_manager

    def test_child_of_a_multi_connector(self, model: str) -> None:
        config = make_config(model, kv=multi(transfer(2)))
        assert settings(config).host_pool_bytes == 2 * GIB
        assert config.kv_transfer_config.kv_connector == "MultiConnector"
        assert not config.scheduler_config.disable_hybrid_kv_cache_manager

    def test_pool_in_hisparse_config_adds_the_connector(self, model: str) -> None:
        config = make_config(model, options={"host_pool_gib": 3})
        assert settings(config).host_pool_gib == 3
        added = config.kv_transfer_config
        assert (added.kv_connector, added.kv_role) == (NAME, "kv_both")

    def test_device_buffer_size(self, model: str) -> None:
        config = make_config(
            model, kv=transfer(), options={"device_buffer_size": 4_096}
        )
        assert settings(config).device_buffer_size == 4_096

    def test_pool_in_hisparse_config_for_a_given_connector(self, model: str) -> None:
        config = make_config(model, kv=transfer(None), options={"host_pool_gib": 1})
        assert settings(config).host_pool_gib == 1

    def test_pool_in_both_places_if_they_agree(self, model: str) -> None:
        config = make_config(model, kv=transfer(1), options={"host_pool_gib": 1})
        assert settings(config).host_pool_gib == 1

    def test_the_mirror_option_of_other_releases_is_accepted(self, model: str) -> None:
        config = make_config(model, kv=transfer(), options={"eager_host_mirror": True})
        assert settings(config).topk == TINY_TOPK

    def test_flags_of_the_command_line(self, model: str) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        args = parser.parse_args(
            [
                "--model",
                model,
                "--attention-config",
                '{"hisparse_config":{"device_buffer_size":4096}}',
                "--kv-transfer-config",
                (
                    '{"kv_connector":"HiSparseConnector","kv_role":"kv_both",'
                    '"kv_connector_extra_config":{"host_pool_gib":384}}'
                ),
            ]
        )
        args = EngineArgs.from_cli_args(args)
        assert args.attention_config.hisparse_config == {"device_buffer_size": 4_096}
        extra = args.kv_transfer_config.kv_connector_extra_config
        assert extra == {"host_pool_gib": 384}


class TestAfterwards:
    def test_a_copied_configuration_is_not_checked_again(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = make_config(model, kv=transfer(1))
        # The host pool is allocated by now.
        monkeypatch.setattr(glue, "available_ram_bytes", lambda: 0)
        assert settings(replace(config)) == settings(config)

    def test_settings_travel_to_workers(self, model: str) -> None:
        config = make_config(model, kv=transfer(1))
        sent = pickle.loads(pickle.dumps(config))
        assert settings(sent) == settings(config)
        assert settings(copy.deepcopy(config)) == settings(config)

    def test_settings_have_a_part_in_the_hash(self, model: str) -> None:
        config = make_config(model, kv=transfer(1))
        off = make_config(model)
        on_hash = config.attention_config.compute_hash()
        assert on_hash != off.attention_config.compute_hash()


class TestOff:
    def test_nothing_is_imported_and_no_setting_is_made(self, tmp_path: Path) -> None:
        code = (
            "import sys, hisparse_configs as h\n"
            f"config = h.make_config(h.write_model(h.Path({str(tmp_path)!r})))\n"
            "assert config.attention_config.hisparse_config is None\n"
            "assert config.kv_transfer_config is None\n"
            "assert not [m for m in sys.modules if 'v1.hisparse' in m]\n"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr[-2_000:]

    def test_other_connectors_are_left_alone(self, model: str) -> None:
        config = make_config(model, kv=OFFLOAD)
        assert config.attention_config.hisparse_config is None
        assert config.kv_transfer_config.kv_connector == "OffloadingConnector"

    def test_the_hash_is_that_of_a_configuration_without_the_field(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm.config import utils

        seen: list[set[str]] = []
        factors = utils.get_hash_factors

        def spy(config: Any, ignored: set[str]) -> dict[str, object]:
            found = factors(config, ignored)
            seen.append(set(found))
            return found

        monkeypatch.setattr(utils, "get_hash_factors", spy)
        make_config(model).attention_config.compute_hash()
        assert seen and not any("hisparse_config" in names for names in seen)


class TestBufferSize:
    @pytest.mark.parametrize("size", [TINY_TOPK - 1, 0, -64, 32_768, "64", 64.0, True])
    def test_out_of_range(self, model: str, size: Any) -> None:
        refuse(
            model,
            f"hisparse_config.device_buffer_size is {size!r};",
            "from 32 (the model's top-k) to 32,767",
            kv=transfer(),
            options={"device_buffer_size": size},
        )

    def test_default_is_twice_the_top_k(self, model: str) -> None:
        config = make_config(model, kv=transfer(), block_size=16)
        assert settings(config).device_buffer_size == 64

    @pytest.mark.parametrize(
        "size, block_size, rows", [(65, 16, 80), (65, 64, 128), (33, 16, 48)]
    )
    def test_rounded_up_to_whole_blocks_with_a_warning(
        self,
        model: str,
        size: int,
        block_size: int,
        rows: int,
        caplog_vllm: list[str],
    ) -> None:
        options = {"device_buffer_size": size}
        config = make_config(
            model, kv=transfer(), options=options, block_size=block_size
        )
        assert settings(config).device_buffer_size == rows
        (line,) = [text for text in caplog_vllm if "device_buffer_size" in text]
        assert f"{size} is not a multiple of the block size {block_size}" in line
        assert f"; {rows} is used" in line

    def test_whole_blocks_give_no_warning(
        self, model: str, caplog_vllm: list[str]
    ) -> None:
        make_config(model, kv=transfer(), options={"device_buffer_size": 64})
        assert not [text for text in caplog_vllm if "device_buffer_size" in text]

    def test_rounding_beyond_the_limit(self, model: str) -> None:
        refuse(
            model,
            "device_buffer_size is 32767;",
            "up to 32,704 in whole blocks of 64",
            kv=transfer(),
            options={"device_buffer_size": 32_767},
            block_size=64,
        )


class TestHostPool:
    @pytest.mark.parametrize("pool", ["384", True, [1], -1, 0, float("nan"), 1e400])
    def test_not_a_number_above_zero(self, model: str, pool: Any) -> None:
        refuse(model, f"is {pool!r};", "a number of GiB above 0", kv=transfer(pool))

    def test_missing_from_the_connector(self, model: str) -> None:
        refuse(
            model,
            "kv_connector_extra_config.host_pool_gib of HiSparseConnector is missing",
            kv=transfer(None),
        )

    def test_missing_everywhere(self, model: str) -> None:
        options = {"device_buffer_size": 64}
        refuse(model, "hisparse_config.host_pool_gib is missing", options=options)
        refuse(model, "hisparse_config.host_pool_gib is missing", options={})

    def test_two_values(self, model: str) -> None:
        refuse(
            model,
            "hisparse_config.host_pool_gib is 2,",
            "is 1",
            kv=transfer(1),
            options={"host_pool_gib": 2},
        )

    def test_larger_than_the_available_memory(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(glue, "available_ram_bytes", lambda: int(1.5 * GIB))
        refuse(model, "2 GiB", "available main memory, 1.50 GiB", kv=transfer(2))
        assert settings(make_config(model, kv=transfer(1.5))).host_pool_gib == 1.5

    def test_every_replica_of_the_node_has_a_pool(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(glue, "available_ram_bytes", lambda: 3 * GIB)
        refuse(
            model,
            "1 GiB for each of 4 replicas, 4.00 GiB in all",
            kv=transfer(1),
            data_parallel_size=4,
        )

    def test_ranks_share_memory_that_is_large_enough(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = SimpleNamespace(total=9 * GIB, free=4 * GIB)
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
        ranks: dict[str, Any] = {
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "mp",
        }
        refuse(
            model,
            "host_pool_gib of HiSparseConnector is 4.00 GiB in all",
            "allowed: 3.00 GiB, which are free there, but for 1.00 GiB",
            kv=transfer(2),
            data_parallel_size=2,
            **ranks,
        )
        assert settings(make_config(model, kv=transfer(3), **ranks))
        assert settings(make_config(model, kv=transfer(5)))
        monkeypatch.setattr(ParallelConfig, "nnodes_within_dp", 2)
        assert settings(make_config(model, kv=transfer(5), **ranks))

    def test_unknown_memory_refuses_nothing(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(glue, "available_ram_bytes", lambda: None)
        assert settings(make_config(model, kv=transfer(9_999))).host_pool_gib == 9_999


class TestConnectors:
    def test_two_of_ours(self, model: str) -> None:
        refuse(model, f"2 {NAME} entries", kv=multi(transfer(1), transfer(2)))

    def test_others_beside_ours(self, model: str) -> None:
        nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        refuse(model, "NixlConnector beside HiSparse", kv=multi(transfer(1), nixl))
        refuse(
            model,
            "NixlConnector beside HiSparse",
            kv=nixl,
            options={"host_pool_gib": 1},
        )

    @pytest.mark.parametrize(
        "given",
        [
            {"kv": multi(transfer(2), OFFLOAD)},
            {"kv": multi(OFFLOAD, transfer(2))},
            {"kv": multi(OFFLOAD), "options": {"host_pool_gib": 2}},
            {"kv": OFFLOAD, "options": {"host_pool_gib": 2}},
            {"options": {"host_pool_gib": 2}, "kv_offloading_size": 1.0},
            {"kv": transfer(2), "kv_offloading_size": 1.0},
            {"kv": multi(transfer(2)), "kv_offloading_size": 1.0},
        ],
        ids=["behind", "before", "published", "alone", "flag", "ours", "multi"],
    )
    def test_the_cpu_tier_of_an_offloading_connector_joins_the_pool(
        self, model: str, given: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        logger = logging.getLogger("vllm.v1.hisparse.glue.connectors")
        logger.addHandler(caplog.handler)
        try:
            with caplog.at_level(logging.INFO, logger.name):
                config = make_config(model, **given)
        finally:
            logger.removeHandler(caplog.handler)
        assert settings(config).host_pool_gib == 3
        assert config.kv_transfer_config.kv_connector == NAME
        assert config.kv_transfer_config.kv_role == "kv_both"
        (line,) = {r.getMessage() for r in caplog.records if "join the" in r.message}
        assert "the 1.00 GiB of OffloadingConnector join" in line
        assert "2.00 GiB, 3.00 GiB in all" in line

    def test_another_backend_of_the_offloading_flag(self, model: str) -> None:
        refuse(
            model,
            "--kv-offloading-backend is lmcache; allowed: native",
            kv=transfer(2),
            kv_offloading_size=1.0,
            kv_offloading_backend="lmcache",
        )

    def test_what_else_was_given_of_the_connectors_stays(self, model: str) -> None:
        kv = {**multi(transfer(2), OFFLOAD), "enable_permute_local_kv": True}
        config = make_config(model, kv=kv)
        assert config.kv_transfer_config.enable_permute_local_kv
        assert config.kv_transfer_config.kv_connector_extra_config == {}

    def test_a_child_with_another_role(self, model: str) -> None:
        kv = multi(transfer(1, role="kv_producer"))
        refuse(model, f"kv_role of {NAME} is 'kv_producer'; allowed: 'kv_both'", kv=kv)

    @pytest.mark.parametrize("tiers", [["disk"], {"type": "disk"}])
    def test_tiers_of_odd_shapes(self, model: str, tiers: Any) -> None:
        extra = {"cpu_bytes_to_use": GIB, "secondary_tiers": tiers}
        offload = {**OFFLOAD, "kv_connector_extra_config": extra}
        refuse(model, "given with disk; allowed", kv=multi(transfer(1), offload))

    def test_keys_of_several_types(self, model: str) -> None:
        refuse(model, "given with 'x', 1", kv=transfer(), options={1: 2, "x": 3})

    def test_an_unknown_key_of_our_connector(self, model: str) -> None:
        kv = transfer(1)
        kv["kv_connector_extra_config"]["device_buffer_size"] = 64
        refuse(
            model,
            "kv_connector_extra_config of HiSparseConnector is given with "
            "'device_buffer_size'; allowed: host_pool_gib",
            "belong into --attention-config",
            kv=kv,
        )

    def test_a_tiering_spec_without_other_tiers_joins_too(self, model: str) -> None:
        extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 2 * GIB}
        offload = {**OFFLOAD, "kv_connector_extra_config": extra}
        config = make_config(model, kv=multi(transfer(1), offload))
        assert settings(config).host_pool_gib == 3

    @pytest.mark.parametrize(
        "extra, named",
        [
            ({"secondary_tiers": [{"type": "fs", "root_dir": "x"}]}, "fs"),
            ({"spec_name": "MySpec", "spec_module_path": "my"}, "MySpec"),
        ],
    )
    def test_other_tiers_of_an_offloading_connector(
        self, model: str, extra: dict[str, Any], named: str
    ) -> None:
        extra = {"cpu_bytes_to_use": GIB, **extra}
        offload = {**OFFLOAD, "kv_connector_extra_config": extra}
        refuse(
            model,
            f"OffloadingConnector beside HiSparse is given with {named}; allowed: its",
            "Remedy: remove the other tiers",
            kv=multi(transfer(1), offload),
        )

    @pytest.mark.parametrize("size", [None, 0, -1, "1 GiB", True, float("inf")])
    def test_the_size_of_an_offloading_connector(self, model: str, size: Any) -> None:
        extra = {"cpu_bytes_to_use": size}
        offload = {**OFFLOAD, "kv_connector_extra_config": extra}
        refuse(
            model,
            f"cpu_bytes_to_use of OffloadingConnector is {size!r}; allowed:",
            kv=multi(transfer(1), offload),
        )

    def test_the_joint_pool_must_fit_in_memory(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(glue, "available_ram_bytes", lambda: 5 * GIB // 2)
        refuse(model, "3.00 GiB in all", kv=multi(transfer(2), OFFLOAD))

    @pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
    def test_role(self, model: str, role: str) -> None:
        refuse(model, f"kv_role is '{role}'", kv=transfer(1, role=role))

    @pytest.mark.parametrize("options", ["64", [64], 4_096])
    def test_options_that_are_no_object(self, model: str, options: Any) -> None:
        refuse(model, f"is {options!r};", kv=transfer(), options=options)

    @pytest.mark.parametrize("seconds", [0, -1, "60", True, float("nan"), None])
    def test_a_timeout_that_is_no_time(self, model: str, seconds: Any) -> None:
        refuse(
            model,
            f"hisparse_config.transfer_timeout_s is {seconds!r}; allowed: a number",
            kv=transfer(),
            options={"transfer_timeout_s": seconds},
        )

    def test_the_timeout_reaches_the_scheduler(self, model: str) -> None:
        assert settings(make_config(model, kv=transfer())).transfer_timeout_s == 60
        options = {"transfer_timeout_s": 2}
        config = make_config(model, kv=transfer(), options=options)
        assert settings(config).transfer_timeout_s == 2.0

    def test_unknown_option(self, model: str) -> None:
        refuse(
            model,
            "'device_bufer_size'",
            "device_buffer_size, host_pool_gib",
            kv=transfer(),
            options={"device_bufer_size": 64},
        )


class TestEngine:
    def test_v1_runner(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        refuse(
            model,
            "the model runner is V1 (VLLM_USE_V2_MODEL_RUNNER=0); allowed: V2",
            kv=transfer(),
        )

    def test_v1_runner_for_want_of_triton(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = make_config(model)
        config.attention_config.hisparse_config = {"host_pool_gib": 1}
        monkeypatch.setattr(glue, "HAS_TRITON", False)
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        with pytest.raises(ValueError, match="is V1 .Triton is not available.*INTERPR"):
            glue.resolve(config)

    def test_hybrid_manager_off(self, model: str) -> None:
        refuse(
            model,
            "the hybrid KV cache manager is off; allowed: on",
            "--disable-hybrid-kv-cache-manager",
            kv=transfer(),
            disable_hybrid_kv_cache_manager=True,
        )

    @pytest.mark.parametrize(
        "field, flag",
        [
            ("pipeline_parallel_size", "--pipeline-parallel-size"),
            ("decode_context_parallel_size", "--decode-context-parallel-size"),
            ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
        ],
    )
    def test_parallelism(self, model: str, field: str, flag: str) -> None:
        config = make_config(model)
        setattr(config.parallel_config, field, 2)
        config.attention_config.hisparse_config = {"host_pool_gib": 1}
        with pytest.raises(ValueError, match=f"HiSparse: {flag} is 2; allowed: 1"):
            glue.resolve(config)

    def test_full_graphs(self, model: str) -> None:
        config = make_config(model)
        config.attention_config.hisparse_config = {"host_pool_gib": 1}
        config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
        with pytest.raises(ValueError, match="cudagraph_mode is FULL; allowed: FULL_A"):
            glue.resolve(config)
        config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        glue.resolve(config)

    def test_ranks_with_a_scheduler_each(self, model: str) -> None:
        launcher: Any = {"distributed_executor_backend": "external_launcher"}
        refuse(
            model,
            "--distributed-executor-backend is external_launcher; allowed: mp, ray",
            kv=transfer(),
            tensor_parallel_size=2,
            **launcher,
        )
        assert settings(make_config(model, kv=transfer(), **launcher))

    def test_routed_experts(self, model: str) -> None:
        """vLLM refuses them beside the connectors that it knows of by then."""
        refuse(
            model,
            "--enable-return-routed-experts is on; allowed: off",
            options={"host_pool_gib": 1},
            enable_return_routed_experts=True,
        )

    def test_sleep_mode(self, model: str) -> None:
        config = make_config(model)
        config.attention_config.hisparse_config = {"host_pool_gib": 1}
        config.model_config.enable_sleep_mode = True
        with pytest.raises(ValueError, match="--enable-sleep-mode is on; allowed: off"):
            glue.resolve(config)

    def test_adaptive_verification(self, model: str) -> None:
        drafts = {"method": "mtp", "num_speculative_tokens": 3}
        config = make_config(model, speculative_config=drafts)
        config.attention_config.hisparse_config = {"host_pool_gib": 1}
        config.speculative_config.enable_adaptive_verification = True
        with pytest.raises(ValueError, match="enable_adaptive_verification is on; all"):
            glue.resolve(config)

    @pytest.mark.parametrize("method", ["ngram", "ngram_gpu"])
    def test_drafts_that_the_v2_runner_does_not_know(
        self, model: str, method: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        drafts = {"method": method, "num_speculative_tokens": 3, "prompt_lookup_max": 4}
        refuse(
            model,
            "the model runner is V1 (ngram/ngram_gpu speculative decoding); allowed",
            kv=transfer(),
            speculative_config=drafts,
        )

    @pytest.mark.parametrize("dtype", ["fp8_e5m2", "nvfp4", "int8_per_token_head"])
    def test_cache_dtype(self, model: str, dtype: str) -> None:
        config = make_config(model)
        config.attention_config.hisparse_config = {"host_pool_gib": 1}
        config.cache_config.cache_dtype = dtype
        with pytest.raises(ValueError, match=f"--kv-cache-dtype is {dtype}; allowed: "):
            glue.resolve(config)

    @pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
    def test_layout(
        self, model: str, layout: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
        refuse(
            model, f"VLLM_KV_CACHE_LAYOUT is {layout}; allowed: LBHNC", kv=transfer()
        )

    def test_layouts_of_whole_pages(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
        assert settings(make_config(model, kv=transfer()))

    def test_block_size_on_the_cpu(self, model: str) -> None:
        refuse(
            model,
            "--block-size is 24; allowed: multiples of 16",
            kv=transfer(),
            block_size=24,
        )

    def test_platform_without_connected_backends(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = make_config(model)
        config.attention_config.hisparse_config = {"host_pool_gib": 1}
        gpu = SimpleNamespace(
            is_cpu=lambda: False, is_cuda=lambda: False, device_name="rocm"
        )
        monkeypatch.setattr(glue, "current_platform", gpu)
        with pytest.raises(ValueError, match="the platform is rocm; allowed: CUDA"):
            glue.resolve(config)
        assert config.kv_transfer_config is None

    def test_block_size_on_cuda(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            type(glue.current_platform), "is_cuda_alike", lambda self: True
        )
        glue.check_block_size(64)
        with pytest.raises(ValueError, match="--block-size is 32; allowed: 64"):
            glue.check_block_size(32)

    def test_model_without_sparse_attention(self, tmp_path: Path) -> None:
        dense = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "index_topk": None,
        }
        model = write_model(tmp_path, dense)
        refuse(model, "index_topk of the model is missing", kv=transfer())

    def test_too_many_rows_a_step(self, tmp_path: Path) -> None:
        model = write_model(tmp_path, {"index_topk": 2_048})
        assert settings(make_config(model, kv=transfer(), drafts=14))
        refuse(
            model,
            "num_speculative_tokens is 15, which with top-k 2048 selects 32,768 rows",
            "allowed: up to 14",
            kv=transfer(),
            drafts=15,
        )


@pytest.fixture
def caplog_vllm() -> Any:
    """Messages of vLLM's loggers, which do not propagate to the root logger."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore
    logging.getLogger("vllm").addHandler(handler)
    yield lines
    logging.getLogger("vllm").removeHandler(handler)
