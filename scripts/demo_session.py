# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The part of the demo that runs in the environment of the built wheel.

Makes a small model, serves it with that environment's ``vllm serve``, and talks to it
through the ``openai`` client. Takes the settings of `DemoSettings.to_json` as its only
argument.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from hisparse_tools.demo_settings import HOST, DemoSettings, free_port
from hisparse_tools.errors import ToolError, run_command
from hisparse_tools.pins import Device
from hisparse_tools.progress import say, step
from hisparse_tools.served_by import Build, ServedBy, metric_total
from hisparse_tools.server import Server, http_get
from make_tiny_glm import make_tiny_glm
from tiny_glm.sizes import TinyGlmSizes

MODEL_NAME = "tiny-glm"
START_TIMEOUT_S = 600
ANSWER_TIMEOUT_S = 600
BLOCK_SIZE = 64
# The server makes sockets in the folder; their names take 65 more characters, and may
# have 107.
_LONGEST_PARENT = 40
# The kernels for GPUs are made for the head counts and the top-k of the real models.
_CUDA_SIZES: dict[str, Any] = {
    "hidden": 512,
    "q_lora_rank": 512,
    "heads": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_heads": 32,
    "index_topk": 2048,
}


@dataclass(frozen=True)
class Turn:
    """One turn, counted by the server; `seconds` is measured here."""

    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    seconds: float


@contextmanager
def work_folder(keep: bool) -> Iterator[Path]:
    """Yield a folder for the model, the log and the server's temporary files.

    An error leaves the log, since its message names it; Ctrl-C leaves nothing.

    Args:
        keep: Leave the model and the log in any case.
    """
    parent = tempfile.gettempdir()
    if len(parent) > _LONGEST_PARENT:
        parent = "/tmp"
    folder = Path(tempfile.mkdtemp(prefix="hisparse-demo-", dir=parent))
    # The server's own temporary files, which some ways of ending leave behind.
    (folder / "tmp").mkdir()
    failed = False
    try:
        yield folder
    except BrokenPipeError:
        # Whoever read the output went away, as `head` does: no failure.
        raise
    except Exception:
        failed = True
        raise
    finally:
        shutil.rmtree(folder / "tmp", ignore_errors=True)
        if keep:
            say(f"kept {folder}")
        elif failed:
            shutil.rmtree(folder / "model", ignore_errors=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def model_sizes(settings: DemoSettings) -> TinyGlmSizes:
    """Return the sizes of the model to serve, its context a whole number of pages."""
    pages = -(-settings.context() // BLOCK_SIZE)
    context = max(4096, pages * BLOCK_SIZE)
    if settings.device is Device.CUDA:
        return TinyGlmSizes(context=context, **_CUDA_SIZES)
    return TinyGlmSizes(context=context)


def cache_bytes(sizes: TinyGlmSizes) -> int:
    """Return the bytes of a KV cache for two requests of the largest context."""
    layers = range(sizes.layers + sizes.mtp_layers)
    latent = 2 * (sizes.kv_lora_rank + sizes.qk_rope_head_dim) * len(layers)
    indexer = (sizes.index_head_dim + 4) * sum(sizes.is_leader(i) for i in layers)
    return 2 * sizes.context * (latent + indexer)


def serve_command(settings: DemoSettings, folder: Path, port: int) -> list[str]:
    """Return ``vllm serve`` of this interpreter's environment, with its arguments."""
    sizes = model_sizes(settings)
    # Through the interpreter: the first line of a script has a length limit.
    command = [sys.executable, str(Path(sys.executable).with_name("vllm")), "serve"]
    options = {
        "host": HOST,
        "port": port,
        "served-model-name": MODEL_NAME,
        "max-model-len": sizes.context,
        "max-num-seqs": 4,
        "block-size": BLOCK_SIZE,
        "kv-cache-memory-bytes": cache_bytes(sizes),
    }
    command += [str(folder / "model"), *(f"--{k}={v}" for k, v in options.items())]
    if settings.device is Device.CPU:
        # Nothing to gain from compiling, and no compiler is needed this way.
        command.append("--enforce-eager")
    return command


def server_env(folder: Path) -> dict[str, str]:
    """Return the server's environment: this process's, less what would disturb."""
    env = {**os.environ, "TMPDIR": str(folder / "tmp"), "VLLM_LOGGING_LEVEL": "INFO"}
    for name in ("VLLM_API_KEY", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING"):
        env.pop(name, None)
    # It imports nothing of this checkout, and three processes would otherwise compile
    # the same thousands of files at every start.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


class Waiting:
    """Shows that the server is starting: in place on a terminal, else now and then."""

    # "(EngineCore pid=7) INFO 11-30 12:00:00 [core.py:1] ": of no use to a reader.
    _PREFIX = re.compile(r"^(?:\(.*?\) )?INFO [\d:. -]+ \[[^\]]*\] (?=[A-Z])")

    def __init__(self) -> None:
        self._in_place = sys.stdout.isatty()
        self._next_s = 0.0
        self._doing = "importing"

    def __call__(self, waited_s: float, line: str) -> None:
        """Show the seconds waited and what the log's last line says, if it is time to.

        Warnings and continued lines are passed over.
        """
        message, is_news = self._PREFIX.subn("", line)
        if is_news:
            self._doing = message
        if waited_s < self._next_s:
            return
        self._next_s = waited_s + (0.5 if self._in_place else 10)
        width = max(40, shutil.get_terminal_size().columns - 1)
        text = f"  {waited_s:3.0f} s  {_printable(self._doing)}"[:width]
        if self._in_place:
            print(f"\r\x1b[K{text}", end="", flush=True)
        elif waited_s > 1:
            say(text)

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._in_place:
            print("\r\x1b[K", end="", flush=True)


def _printable(text: str) -> str:
    """No control characters: a byte-level model may well emit an escape sequence."""
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


class Conversation:
    """Messages to and fro, over HTTP."""

    def __init__(self, server: Server, url: str, max_tokens: int) -> None:
        self._server, self._url, self._max_tokens = server, url, max_tokens
        self._messages: list[dict[str, str]] = []
        self._client = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            timeout=ANSWER_TIMEOUT_S,
            max_retries=0,
            # Not through a proxy: the server is on this machine.
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )

    def turn(self, message: str) -> Turn:
        """Say something, and print the answer as it comes.

        Raises:
            ToolError: If the server ends or answers with an error.
        """
        say(f"\nuser>  {_printable(message)}")
        self._messages.append({"role": "user", "content": message})
        hits, start = self._hits(), time.monotonic()
        print("model> ", end="", flush=True)
        answer, usage = "", None
        for piece, counts in self._stream():
            print(_printable(piece), end="", flush=True)
            answer += piece
            usage = counts or usage
        seconds = time.monotonic() - start
        say()
        if usage is None:
            raise self._server.error("the answer ended without a count of its tokens")
        self._messages.append({"role": "assistant", "content": answer})
        cached = self._hits() - hits
        return Turn(usage.prompt_tokens, cached, usage.completion_tokens, seconds)

    def _stream(self) -> Iterator[tuple[str, Any]]:
        try:
            chunks = self._client.chat.completions.create(
                model=MODEL_NAME,
                messages=self._messages,
                max_tokens=self._max_tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            for chunk in chunks:
                delta = chunk.choices[0].delta.content if chunk.choices else ""
                yield delta or "", chunk.usage
        except Exception as error:
            say()
            self._check_for(5.0)
            raise self._server.error(
                f"the answer broke off: {type(error).__name__}: {error}"
            ) from error

    def _hits(self) -> int:
        metrics = endpoint(self._server, f"{self._url}/metrics")
        return int(metric_total(metrics, "vllm:prefix_cache_hits_total"))

    def _check_for(self, seconds: float) -> None:
        """A server whose engine died answers with an error first, and then ends."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._server.check("answering")
            time.sleep(0.1)


def endpoint(server: Server, url: str) -> str:
    """Return what an endpoint of the server answers.

    Raises:
        ToolError: If it does not answer.
    """
    text = http_get(url, timeout_s=30)
    if text is None:
        server.check("answering")
        raise server.error(f"{url} does not answer")
    return text


def page(served: ServedBy, build: Build, turns: Sequence[Turn]) -> str:
    """Return the closing page."""
    rows = [
        ("vLLM", served.version),
        ("build", f"source tree {build.tree}, {build.patches} patches"),
        ("model runner", served.runner),
        ("attention", served.backend),
        ("device", served.device),
        ("residency", served.residency),
        ("KV cache", served.cache),
    ]
    lines = ["What served this, by the server's own log and endpoints:"]
    lines += [f"  {name:<13} {value}" for name, value in rows]
    lines += ["", "  turn  prompt tokens  from the prefix cache  new tokens  tokens/s"]
    for number, turn in enumerate(turns, 1):
        rate = turn.answer_tokens / turn.seconds
        lines.append(
            f"  {number:>4}  {turn.prompt_tokens:>13}  {turn.cached_tokens:>21}"
            f"  {turn.answer_tokens:>10}  {rate:>8.1f}"
        )
    lines += [
        "",
        "The answers are gibberish, and are meant to be: the model is tiny, its",
        "weights are random, and its tokens are single bytes. The engine around it is",
        "the real one: the same server, scheduler, caches and model class serve GLM-5.",
    ]
    return "\n".join(lines)


def run(settings: DemoSettings) -> None:
    """Serve and talk.

    Raises:
        ToolError: If anything goes wrong with the server.
    """
    build = Build.installed()
    port = free_port(settings.port)
    url = f"http://{HOST}:{port}"
    with work_folder(settings.keep) as folder:
        with step("making a small GLM with random weights"):
            make_tiny_glm(folder / "model", **vars(model_sizes(settings)))
        command, env = serve_command(settings, folder, port), server_env(folder)
        with Server(command, folder / "server.log", env, folder) as server:
            with step(f"starting vllm serve on {url}"), Waiting() as waiting:
                server.wait_until_ready(f"{url}/health", START_TIMEOUT_S, waiting)
            conversation = Conversation(server, url, settings.max_tokens)
            turns = [conversation.turn(message) for message in settings.messages]
            served = ServedBy.read(
                server.log.read_text(encoding="utf-8", errors="replace"),
                endpoint(server, f"{url}/version"),
                endpoint(server, f"{url}/metrics"),
            )
            served.check(build)
            say("\n" + page(served, build, turns) + "\n")
            with step("stopping the server"):
                server.stop()


def _hang_up(signum: int, frame: object) -> None:
    """The terminal is gone: clean up as after Ctrl-C, and print no more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    raise KeyboardInterrupt


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _hang_up)
    if len(argv) != 1:
        raise ToolError("the settings are missing", "run nox -s demo")
    # The text may hold characters that the terminal's encoding lacks.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    run(DemoSettings.from_json(argv[0]))
    return 0


if __name__ == "__main__":
    run_command(main)
