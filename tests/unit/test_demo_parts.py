# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The demo's flags, what it reads from a server, and how it hands over."""

import json
import os
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import demo
import demo_session
from hisparse_demo.screen import Waiting, printable
from hisparse_demo.serving import (
    block_size,
    budget_bytes,
    budget_pages,
    host_pool_gib,
    model_sizes,
    serve_command,
    server_env,
    token_bytes,
)
from hisparse_tools import served_by
from hisparse_tools.demo_settings import (
    CONVERSATIONS,
    MAX_CONTEXT,
    DemoSettings,
    free_port,
    parse_settings,
)
from hisparse_tools.errors import ToolError
from hisparse_tools.pins import Device
from hisparse_tools.served_by import Build, ServedBy, metric_labels, metric_totals

# As a server writes them, shortened.
LOG = """\
(EngineCore pid=2) INFO 11-29 23:28:57 [core.py:123] Initializing a V1 LLM engine \
(v0.29.0) with config: model='m', enforce_eager=True, device_config=cpu, seed=0
(Worker pid=3) INFO 11-29 23:29:14 [cpu_worker.py:177] Using V2 Model Runner
(Worker pid=3) INFO 11-29 23:29:15 [cpu.py:145] Using CPU_MLA_SPARSE backend.
(Worker pid=3) INFO 11-29 23:29:15 [selector.py:111] Using CPU SDPA MLA prefill backend.
(Worker pid=3) INFO 11-29 23:29:15 [unquantized.py:319] Using CPU Unquantized MoE \
backend out of potential backends: ['CPU'].
"""
CUDA_LOG = LOG.replace("device_config=cpu", "device_config=cuda").replace(
    "Using CPU_MLA_SPARSE backend.",
    "Using FLASHMLA_SPARSE attention backend out of potential backends: [...].",
)
VERSION = '{"version":"0.29.0+cpu.hisparse.1"}'
METRICS = """\
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 64.0
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 128.0
vllm:prefix_cache_hits_created{engine="0",model_name="m"} 1.795994960321e+09
vllm:cache_config_info{block_size="64",cache_dtype="auto",\
kv_cache_size_tokens="896"} 1.0
process_open_fds 51.0
"""
BUILD = Build("0.29.0+cpu.hisparse.1", "f512118a", 3)


def settings(*argv: str, device: Device = Device.CPU) -> DemoSettings:
    return parse_settings(argv, device)


class TestFlags:
    def test_without_flags_there_are_three_turns_that_differ(self) -> None:
        assert len(set(settings().messages)) == 3

    def test_the_first_message_fills_a_page(self) -> None:
        """So the second turn finds something in the prefix cache."""
        assert len(settings("--turns", "1").messages[0]) > 64

    def test_prompts_come_first_and_set_the_number_of_turns(self) -> None:
        assert settings("--prompt", "a", "--prompt", "b").messages == ("a", "b")
        more = settings("--prompt", "a", "--turns", "9")
        assert more.messages[0] == "a" and len(more.messages) == 9

    def test_the_device_is_the_one_found_unless_named(self) -> None:
        assert settings(device=Device.CUDA).device is Device.CUDA
        assert settings("--device", "cpu", device=Device.CUDA).device is Device.CPU

    def test_the_context_holds_all_that_is_said(self) -> None:
        """Marks: 2 at the beginning, and a role and a line break for each message.

        All but the first conversation have three bytes more at their beginning.
        """
        given = settings("--prompt", "aé", "--prompt", "b", "--max-tokens", "10")
        assert given.context() == 2 + (3 + 3 + 10 + 4) + (1 + 10 + 4)

    def test_conversations_share_no_page(self) -> None:
        first, *others = settings().conversations()
        assert first == settings().messages
        assert len({messages[0][:3] for messages in [first, *others]}) == CONVERSATIONS
        assert all(messages[1:] == first[1:] for messages in others)

    @pytest.mark.parametrize(
        ("argv", "runs"),
        [
            ([], (False, True)),
            (["--hisparse", "compare"], (False, True)),
            (["--hisparse", "off"], (False,)),
            (["--hisparse", "on"], (True,)),
            (["--device", "cuda"], (False,)),
        ],
    )
    def test_both_servers_are_started_unless_told_or_on_a_gpu(
        self, argv: list[str], runs: tuple[bool, ...]
    ) -> None:
        assert settings(*argv).runs() == runs

    def test_settings_survive_the_hand_over(self) -> None:
        given = settings(
            "--prompt", "é\n'\"", "--port", "8000", "--keep", "--hisparse", "on"
        )
        assert DemoSettings.from_json(given.to_json()) == given

    @pytest.mark.parametrize(
        ("argv", "what"),
        [
            (
                ["--turns", "0"],
                "--turns is '0'; allowed is a whole number",
            ),
            (["--turns", "two"], "--turns is 'two'; allowed is a whole number from 1"),
            (["--turns", "21"], "from 1 to 20"),
            (["--max-tokens", "-5"], "--max-tokens is '-5'; allowed is a whole number"),
            (["--max-tokens", "513"], "from 1 to 512"),
            (
                ["--port", "65536"],
                "--port is '65536'; allowed is a whole number",
            ),
            (["--device", "tpu"], "--device is 'tpu'; allowed are cuda, cpu"),
            (["--hisparse", "1"], "--hisparse is '1'; allowed are off, on, compare"),
            (["--device", "cuda", "--hisparse", "on"], "no GPU has run HiSparse yet"),
            (["--trns", "2"], "unrecognized arguments: --trns"),
            (["--turns"], "--turns: expected one argument"),
            (["--prompt", " "], "--prompt is empty"),
            (["--prompt", "a", "--prompt", "b", "--turns", "1"], "given 2 times"),
            (["--prompt", "a\udcff"], "--prompt is not valid text"),
            (["--prompt", "x" * MAX_CONTEXT], f"a context of at most {MAX_CONTEXT}"),
        ],
    )
    def test_a_bad_value_is_refused(self, argv: list[str], what: str) -> None:
        with pytest.raises(ToolError) as caught:
            settings(*argv)
        assert what in caught.value.what
        assert caught.value.remedy


class TestPort:
    def test_any_free_port_will_do(self) -> None:
        assert free_port(0) > 1023

    def test_a_port_in_use_is_refused(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ToolError, match=f"--port is {port}.* in use"):
                free_port(port)
        assert free_port(port) == port


class TestServedBy:
    def test_metrics_are_summed_over_labels(self) -> None:
        totals = metric_totals(METRICS)
        assert totals["vllm:prefix_cache_hits_total"] == 192
        assert totals["process_open_fds"] == 51
        assert totals["vllm:prefix_cache_hits"] == 0

    def test_labels_are_read(self) -> None:
        labels = metric_labels(METRICS, "vllm:cache_config_info")
        assert labels == {
            "block_size": "64",
            "cache_dtype": "auto",
            "kv_cache_size_tokens": "896",
        }

    @pytest.mark.parametrize(
        ("log", "backend", "device"),
        [(LOG, "CPU_MLA_SPARSE", "cpu"), (CUDA_LOG, "FLASHMLA_SPARSE", "cuda")],
    )
    def test_facts_come_from_log_and_endpoints(
        self, log: str, backend: str, device: str
    ) -> None:
        assert ServedBy.read(log, VERSION, METRICS) == ServedBy(
            version="0.29.0+cpu.hisparse.1",
            runner="V2",
            backend=backend,
            device=device,
            residency="full: HiSparse off",
            cache="896 tokens in pages of 64, dtype auto",
        )

    def test_a_server_with_hisparse_metrics_has_it_on(self) -> None:
        metrics = METRICS + "vllm:hisparse_cache_hits_total 0.0\n"
        served = ServedBy.read(LOG, VERSION, metrics)
        assert served.residency.endswith("HiSparse on")

    @pytest.mark.parametrize(
        ("line", "what"),
        [
            ("Using V2 Model Runner", "model runner"),
            ("Using CPU_MLA_SPARSE backend.", "attention backend"),
            ("device_config=cpu", "device"),
        ],
    )
    def test_nothing_is_guessed(self, line: str, what: str) -> None:
        with pytest.raises(ToolError, match=f"does not say which {what}"):
            ServedBy.read(LOG.replace(line, ""), VERSION, METRICS)

    def test_another_servers_version_is_refused(self) -> None:
        served = ServedBy.read(LOG, '{"version":"0.29.0"}', METRICS)
        with pytest.raises(ToolError, match=r"vLLM 0\.29\.0, but the build is 0\.29"):
            served.check(BUILD)

    def test_the_other_runner_is_refused(self) -> None:
        served = ServedBy.read(LOG.replace("V2 Model", "V1 Model"), VERSION, METRICS)
        with pytest.raises(ToolError, match="runner V1; this project needs V2"):
            served.check(BUILD)

    def test_the_right_server_is_accepted(self) -> None:
        ServedBy.read(LOG, VERSION, METRICS).check(BUILD)

    def test_a_vllm_of_another_origin_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        foreign = SimpleNamespace(read_text=lambda name: None)
        monkeypatch.setattr(served_by, "distribution", lambda name: foreign)
        with pytest.raises(ToolError, match="is not this project's"):
            Build.installed()


class TestHandOver:
    @pytest.fixture
    def handed_over(self, monkeypatch: pytest.MonkeyPatch) -> dict:
        """What the command executes, with all that is slow replaced."""
        seen: dict = {}
        built = SimpleNamespace(path=Path("w.whl"), version="1", sha256="0")

        def build(project: object, device: Device) -> object:
            seen["device"] = device
            return built

        def execve(*args: object) -> None:
            seen["program"], seen["argv"], seen["env"] = args

        monkeypatch.setattr(demo, "build", build)
        monkeypatch.setattr(demo, "ensure_env", lambda project, path: Path("/cpu/py"))
        monkeypatch.setattr(demo, "ensure_cuda_env", lambda path: Path("/cuda/py"))
        monkeypatch.setattr(
            demo, "end_with_parent", lambda: seen.update(follows_parent=True)
        )
        monkeypatch.delenv("NOX_CURRENT_SESSION", raising=False)
        monkeypatch.setattr(demo, "detect", lambda: Device.CPU)
        monkeypatch.setattr(os, "execve", execve)
        return seen

    def test_on_the_cpu_triton_is_interpreted(self, handed_over: dict) -> None:
        demo.main(["--turns", "2"])
        assert handed_over["device"] is Device.CPU
        assert handed_over["program"] == Path("/cpu/py")
        assert handed_over["env"]["TRITON_INTERPRET"] == "1"
        [program, script, text] = handed_over["argv"]
        assert program == "/cpu/py" and Path(script).is_file()
        assert len(json.loads(text)["messages"]) == 2

    def test_on_cuda_it_is_not(
        self, handed_over: dict, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        demo.main(["--device", "cuda"])
        assert handed_over["device"] is Device.CUDA
        assert handed_over["program"] == Path("/cuda/py")
        assert "TRITON_INTERPRET" not in handed_over["env"]

    def test_under_nox_it_ends_when_nox_does(
        self, handed_over: dict, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        demo.main([])
        assert "follows_parent" not in handed_over
        monkeypatch.setenv("NOX_CURRENT_SESSION", "demo")
        demo.main([])
        assert handed_over["follows_parent"]

    def test_a_bad_flag_is_refused_before_the_build(self, handed_over: dict) -> None:
        with pytest.raises(ToolError):
            demo.main(["--turns", "0"])
        assert handed_over == {}


class TestWaiting:
    """What is shown while the server starts."""

    NEWS = (
        "(Worker pid=7) INFO 11-29 23:29:14 [cpu_worker.py:177] Using V2 Model Runner"
    )

    def test_off_a_terminal_a_line_comes_every_ten_seconds(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with Waiting() as waiting:
            for tenths in range(0, 250, 2):
                waiting(tenths / 10, self.NEWS)
        lines = capsys.readouterr().out.splitlines()
        assert lines == [
            "   10 s  Using V2 Model Runner",
            "   20 s  Using V2 Model Runner",
        ]

    def test_on_a_terminal_one_line_is_kept_up_to_date_and_removed(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        with Waiting() as waiting:
            waiting(3.0, self.NEWS)
        out = capsys.readouterr().out
        assert out == "\r\x1b[K    3 s  Using V2 Model Runner\r\x1b[K"

    @pytest.mark.parametrize(
        "line",
        [
            "",
            "(APIServer pid=1) WARNING 11-29 23:28:38 [sys.py:1] Found ulimit of 9",
            "(APIServer pid=1) INFO 11-29 23:28:38 [core.py:1] \tcontinued=1",
            "Loading safetensors checkpoint shards:   0% Completed",
        ],
    )
    def test_what_is_no_news_leaves_the_news(
        self, line: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with Waiting() as waiting:
            waiting(1.0, self.NEWS)
            waiting(12.0, line)
        assert capsys.readouterr().out == "   12 s  Using V2 Model Runner\n"


class TestSession:
    def test_a_long_temporary_folder_is_not_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server's sockets would have names that are too long."""
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 60)))
        with demo_session.work_folder(keep=False) as folder:
            assert len(f"{folder}/tmp/{'x' * 36}") <= 107
        assert not folder.exists()

    @pytest.mark.parametrize(
        ("error", "left"),
        [
            (ToolError("it broke", "mend it"), {"server.log"}),
            (KeyboardInterrupt(), None),
            (BrokenPipeError(), None),
        ],
    )
    def test_an_error_leaves_the_log_that_it_names_and_nothing_else(
        self, error: BaseException, left: set[str] | None
    ) -> None:
        with pytest.raises(type(error)), demo_session.work_folder(False) as folder:
            (folder / "server.log").write_text("why")
            (folder / "model").mkdir()
            raise error
        found = {path.name for path in folder.iterdir()} if folder.exists() else None
        shutil.rmtree(folder, ignore_errors=True)
        assert found == left

    def test_control_characters_are_not_printed(self) -> None:
        text = printable("a\x1b[2Jb\n\u202ec é")
        assert text == "a\ufffd[2Jb\n\ufffdc é"


class TestServing:
    def test_a_token_takes_what_the_served_layers_keep_of_it(self) -> None:
        # 6 latents of 576 bf16 values, 3 indexer rows of 128 fp8 values and a scale
        assert token_bytes(model_sizes(settings())) == 6 * 576 * 2 + 3 * 132

    def test_the_budget_holds_one_conversation_but_not_all(self) -> None:
        for argv in ([], ["--turns", "1", "--max-tokens", "1"], ["--turns", "20"]):
            given = settings(*argv)
            size, context = block_size(Device.CPU), model_sizes(given).context
            # One block is vLLM's own.
            tokens = (budget_pages(given) - 1) * size
            assert context <= tokens < CONVERSATIONS * given.context()
            assert budget_bytes(given) % (size * token_bytes(model_sizes(given))) == 0

    def test_the_host_pool_holds_all_conversations(self) -> None:
        given = settings()
        all_bytes = CONVERSATIONS * given.context() * token_bytes(model_sizes(given))
        assert all_bytes <= host_pool_gib(given) * 2**30

    def test_on_a_gpu_all_conversations_fit(self) -> None:
        given = settings(device=Device.CUDA)
        context = model_sizes(given).context
        assert context >= 4096
        assert (budget_pages(given) - 1) * 64 >= CONVERSATIONS * context

    def test_only_the_connector_makes_the_difference(self, tmp_path: Path) -> None:
        off = serve_command(settings(), tmp_path, 8000, hisparse=False)
        on = serve_command(settings(), tmp_path, 8000, hisparse=True)
        [added] = set(on) - set(off)
        assert set(off) < set(on)
        name, _, value = added.partition("=")
        assert name == "--kv-transfer-config"
        assert json.loads(value)["kv_connector"] == "HiSparseConnector"

    def test_outputs_can_be_compared_on_the_cpu(self, tmp_path: Path) -> None:
        assert server_env(tmp_path, Device.CPU)["VLLM_BATCH_INVARIANT"] == "1"

    def test_a_long_conversation_gets_a_larger_context(self) -> None:
        long = settings("--prompt", "x" * 8000)
        context = model_sizes(long).context
        assert context % 64 == 0
        assert long.context() <= context < long.context() + 64

    def test_the_server_is_this_environments_own(self, tmp_path: Path) -> None:
        command = serve_command(settings(), tmp_path, 8000, hisparse=False)
        assert command[:3] == [
            sys.executable,
            f"{Path(sys.executable).parent}/vllm",
            "serve",
        ]
        assert "--port=8000" in command and "--enforce-eager" in command

    def test_settings_of_the_shell_do_not_disturb_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("VLLM_API_KEY", "secret")
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        env = server_env(tmp_path, Device.CPU)
        assert env["VLLM_LOGGING_LEVEL"] == "INFO"
        assert not {"VLLM_API_KEY", "PYTHONDONTWRITEBYTECODE"} & env.keys()
