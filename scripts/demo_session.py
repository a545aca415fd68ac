# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The part of the demo that runs in the environment of the built wheel.

Makes a small model, serves it with that environment's ``vllm serve``, and holds several
conversations with it through the ``openai`` client: once without and once with
HiSparse, under one KV budget. Takes the settings of `DemoSettings.to_json` as its only
argument.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hisparse_demo import chart
from hisparse_demo.measure import Load, Monitor, capacity_pages
from hisparse_demo.report import Outcome, comparison, first_difference, page
from hisparse_demo.screen import Waiting
from hisparse_demo.serving import (
    block_size,
    budget_bytes,
    budget_pages,
    model_sizes,
    serve_command,
    server_env,
)
from hisparse_demo.talk import Talk, Turn
from hisparse_tools.demo_settings import (
    CONVERSATIONS,
    HOST,
    DemoSettings,
    HiSparse,
    free_port,
)
from hisparse_tools.errors import ToolError, run_command
from hisparse_tools.pins import Device
from hisparse_tools.progress import say, step
from hisparse_tools.served_by import Build, ServedBy, metric_totals
from hisparse_tools.server import Server, http_get
from make_tiny_glm import make_tiny_glm

START_TIMEOUT_S = 600
_SETTLE_S = 10
# The server makes sockets in the folder; their names take 65 more characters, and may
# have 107.
_LONGEST_PARENT = 40
_NO_PRESSURE = """\
Nothing was preempted without HiSparse: these conversations are too short to show
the difference. Raise --turns or --max-tokens."""
_CLOSING = """\
The answers are gibberish, and are meant to be: the model is tiny, its
weights are random, and its tokens are single bytes. The engine around it is
the real one: the same server, scheduler, caches and model class serve GLM-5."""
_NOTES = """\
  Recomputed: the tokens that the engine's steps computed, by its log, less those
  that the conversations came to. After a preemption: beyond each prompt, less what
  the prefix cache had of it, and each answer, by /metrics. The rest is of earlier
  turns; some always is, as the prefix cache keeps whole pages only.
  Running: by /metrics, every 0.2 s. Hits: among the selected rows that are not
  resident. Bytes to and from the host: copied pages and fetched rows."""
_NOT_A_SPEED = """\
  Seconds and tokens/s are no measure of speed: the kernels run in an interpreter."""


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


@dataclass(frozen=True)
class Served:
    """A server's outcome, and its part of the picture."""

    outcome: Outcome
    run: chart.Run


def settled_metrics(server: Server, url: str, tokens: int) -> str:
    """Return what ``/metrics`` answers once it counts all tokens that were answered.

    The last token is sent before it is counted.
    """
    deadline = time.monotonic() + _SETTLE_S
    while True:
        metrics = endpoint(server, f"{url}/metrics")
        counted = metric_totals(metrics)["vllm:generation_tokens_total"]
        if counted >= tokens or time.monotonic() > deadline:
            return metrics
        time.sleep(0.1)


def _talk(settings: DemoSettings, server: Server, url: str) -> tuple[list, Monitor]:
    conversations = settings.conversations()
    turns = len(settings.messages)
    say(f"  {len(conversations)} conversations of {turns} turns at the same time;")
    say("  this is the first:")
    with Monitor(lambda: http_get(f"{url}/metrics")) as monitor:
        talk = Talk(server, url, conversations, settings.max_tokens)
        return talk.hold(), monitor


def serve(
    settings: DemoSettings, folder: Path, port: int, hisparse: bool, build: Build
) -> Served:
    """Start a server, hold the conversations with it, and stop it.

    Raises:
        ToolError: If anything goes wrong with the server.
    """
    url, name = f"http://{HOST}:{port}", "with" if hisparse else "without"
    command = serve_command(settings, folder / "model", port, hisparse)
    env = server_env(folder, settings.device)
    log = folder / f"server-{name}-hisparse.log"
    with Server(command, log, env, folder) as server:
        title = f"starting vllm serve {name} HiSparse on {url}"
        with step(title), Waiting() as waiting:
            server.wait_until_ready(f"{url}/health", START_TIMEOUT_S, waiting)
        turns, monitor = _talk(settings, server, url)
        answers = [turn for conversation in turns for turn in conversation]
        tokens = sum(len(turn.tokens) for turn in answers)
        metrics = settled_metrics(server, url, tokens)
        version = endpoint(server, f"{url}/version")
        with step("stopping the server"):
            server.stop()
    text = log.read_text(encoding="utf-8", errors="replace")
    served = ServedBy.read(text, version, metrics)
    served.check(build)
    load = Load.read(metrics, text, monitor.samples, turns)
    outcome = Outcome(hisparse, served, load, turns)
    capacity = capacity_pages(metrics)
    return Served(outcome, chart.Run(_title(outcome), monitor.samples, capacity))


def _title(outcome: Outcome) -> str:
    count = outcome.load.preemptions
    return f"{outcome.name}: {count} preemption{'' if count == 1 else 's'}"


def _draw(settings: DemoSettings, runs: Sequence[chart.Run]) -> Path:
    path = Path(settings.out) / "pages.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(chart.draw(runs), encoding="utf-8")
    new.replace(path)
    return path


def conclude(settings: DemoSettings, parts: Sequence[Served], build: Build) -> None:
    """Print who served and what came of it, and draw the picture.

    Raises:
        ToolError: If the outputs differ.
    """
    outcomes = [part.outcome for part in parts]
    say("\n" + page(outcomes, build) + "\n")
    pages, size = budget_pages(settings), block_size(settings.device)
    say(f"{CONVERSATIONS} conversations at the same time, in a KV cache of")
    say(f"{budget_bytes(settings):,} bytes, {pages} pages of {size} tokens:")
    say(comparison(outcomes) + "\n\n" + _NOTES)
    if settings.device is Device.CPU:
        say(_NOT_A_SPEED)
    say()
    difference = None
    if len(outcomes) == 2:
        difference = first_difference(outcomes[0].turns, outcomes[1].turns)
        if difference is None:
            say(f"outputs: equal, {_compared(outcomes[0].turns)}, bit for bit")
        if not outcomes[0].load.preemptions:
            say(_NO_PRESSURE)
    say(
        f"pages by residency over time: {_draw(settings, [part.run for part in parts])}"
    )
    say("\n" + _CLOSING + "\n")
    if difference is not None:
        raise ToolError(
            f"the outputs differ, without and with HiSparse: {difference}",
            "run it again with --keep, and report it with the logs",
        )


def _compared(turns: Sequence[Sequence[Turn]]) -> str:
    answers = [turn for conversation in turns for turn in conversation]
    tokens = sum(len(turn.tokens) for turn in answers)
    return f"{len(answers)} answers, {tokens:,} tokens and their log-probabilities"


def run(settings: DemoSettings) -> None:
    """Serve and talk, once for each run of the settings.

    Raises:
        ToolError: If anything goes wrong with a server, or the outputs differ.
    """
    build = Build.installed()
    port = free_port(settings.port)
    if settings.device is Device.CUDA and settings.hisparse is not HiSparse.OFF:
        say("No GPU has run HiSparse yet: served once, without it.")
    with work_folder(settings.keep) as folder:
        with step("making a small GLM with random weights"):
            make_tiny_glm(folder / "model", **vars(model_sizes(settings)))
        parts = [
            serve(settings, folder, port, hisparse, build)
            for hisparse in settings.runs()
        ]
        conclude(settings, parts, build)


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
