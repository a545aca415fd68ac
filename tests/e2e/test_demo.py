# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The demo's session as a user runs it: a real server, a real client, real signals."""

import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import demo_session
from hisparse_tools.demo_settings import DemoSettings
from hisparse_tools.env import cpu_run_env
from hisparse_tools.pins import Device
from hisparse_tools.served_by import Build
from hisparse_tools.server import session_processes

pytestmark = pytest.mark.slow

START_S = 300
STOP_S = 60


def session_settings(**changes: object) -> DemoSettings:
    fields = {
        "device": Device.CPU,
        "messages": ("A message that is longer than one page of tokens. " * 2, "And?"),
        "max_tokens": 24,
        "port": 0,
        "keep": False,
    }
    return DemoSettings(**(fields | changes))


class Demo:
    """A running session; what it prints, with the time when each piece came."""

    def __init__(self, folder: Path, settings: DemoSettings) -> None:
        self.folder = folder
        env = cpu_run_env() | {"TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        # Of these tests' in-process engines, not of a user's server.
        for name in ("VLLM_BATCH_INVARIANT", "VLLM_ENABLE_V1_MULTIPROCESSING"):
            env.pop(name, None)
        script = demo_session.__file__
        self._error = folder / "stderr"
        with self._error.open("wb") as error:
            self.process = subprocess.Popen(
                [sys.executable, script, settings.to_json()],
                env=env,
                stdout=subprocess.PIPE,
                stderr=error,
            )
        self.pieces: list[str] = []

    def read_until(self, text: str, seconds: float) -> None:
        """Read what comes until it contains `text`."""
        assert self.process.stdout is not None
        descriptor, deadline = self.process.stdout.fileno(), time.monotonic() + seconds
        while text not in self.output():
            piece = os.read(descriptor, 1 << 16)
            assert piece, f"it ended without {text!r}: {self.output()}{self.error()}"
            assert time.monotonic() < deadline, self.output()
            self.pieces.append(piece.decode())

    def finish(self, seconds: float) -> int:
        """Read to the end and return the exit status."""
        rest, _ = self.process.communicate(timeout=seconds)
        self.pieces.append(rest.decode())
        return self.process.returncode

    def output(self) -> str:
        return "".join(self.pieces)

    def error(self) -> str:
        return self._error.read_text()

    def left_behind(self) -> list[str]:
        """Files that the session made in its temporary folder and did not remove."""
        return [path.name for path in self.folder.iterdir() if path.name != "stderr"]

    def note_server(self) -> None:
        """Wait until the server exists, and remember its session."""
        deadline = time.monotonic() + START_S
        while not (leaders := self._session_leaders()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        [self._server] = leaders

    def _session_leaders(self) -> list[int]:
        """Children that began a session of their own."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if os.getsid(int(child)) == int(child)]

    def servers(self) -> dict[int, str]:
        """The server's processes that are alive, with their names."""
        found = session_processes(self._server)
        return {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in found}


@pytest.fixture(scope="module")
def temporary() -> Iterator[Callable[[], Path]]:
    """Makes folders with a short name: sockets are made in them."""
    with tempfile.TemporaryDirectory(prefix="demo-") as parent:
        numbers = itertools.count()

        def make() -> Path:
            folder = Path(parent) / str(next(numbers))
            folder.mkdir()
            return folder

        yield make


@pytest.fixture
def start(temporary: Callable[[], Path]) -> Iterator[Callable[..., Demo]]:
    running: list[Demo] = []

    def start_demo(**changes: object) -> Demo:
        running.append(Demo(temporary(), session_settings(**changes)))
        return running[-1]

    yield start_demo
    for one in running:
        one.process.kill()
        one.process.wait()


@pytest.fixture(scope="module")
def finished(temporary: Callable[[], Path]) -> Demo:
    """A conversation of two turns, held to its end."""
    settings = session_settings(keep=True)
    one = Demo(temporary(), settings)
    try:
        one.read_until("starting vllm serve", START_S)
        one.note_server()
        one.read_until("model> ", START_S)
        for _ in settings.messages:
            one.read_until("\n", START_S)
        one.read_until("tokens/s", START_S)
        assert one.finish(STOP_S) == 0, one.error()
    finally:
        one.process.kill()
    return one


def fact(one: Demo, name: str) -> str:
    [value] = re.findall(rf"^  {name} +(.+)$", one.output(), re.M)
    return value


def turns(one: Demo) -> list[list[int]]:
    """Turn, prompt tokens, cached tokens and new tokens of each turn."""
    rows = re.findall(r"^ +(\d+) +(\d+) +(\d+) +(\d+) +[\d.]+$", one.output(), re.M)
    return [[int(value) for value in row] for row in rows]


def answers(one: Demo) -> list[str]:
    return re.findall(r"^model> (.*)$", one.output(), re.M)


def test_every_message_is_answered_with_as_many_tokens_as_asked(finished: Demo) -> None:
    assert [row[3] for row in turns(finished)] == [24, 24]
    assert [len(answer) for answer in answers(finished)] == [24, 24]


def test_the_answers_come_in_pieces(finished: Demo) -> None:
    """At least one in three tokens was seen before the next one came."""
    pieces = [piece for piece in finished.pieces if 0 < len(piece) < 4]
    assert len(pieces) > 16


def test_later_turns_find_whole_pages_of_earlier_ones(finished: Demo) -> None:
    [[_, first, first_cached, _], [_, second, second_cached, _]] = turns(finished)
    assert first_cached == 0
    # Only whole pages are kept, and the last token is not yet among them.
    assert second_cached == (first + 24 - 1) // 64 * 64
    assert 64 <= second_cached < second


def test_the_page_names_the_installed_build(finished: Demo) -> None:
    build = Build.installed()
    assert fact(finished, "vLLM") == build.version
    assert build.tree in fact(finished, "build")


def test_the_page_names_what_served(finished: Demo) -> None:
    assert fact(finished, "model runner") == "V2"
    assert fact(finished, "attention") == "CPU_MLA_SPARSE"
    assert fact(finished, "device") == "cpu"
    assert fact(finished, "residency") == "full: HiSparse off"


def test_the_page_says_that_the_text_means_nothing(finished: Demo) -> None:
    assert "gibberish" in finished.output()


def test_keeping_leaves_model_and_log_and_nothing_else(finished: Demo) -> None:
    [name] = finished.left_behind()
    folder = finished.folder / name
    assert f"kept {folder}" in finished.output()
    assert {path.name for path in folder.iterdir()} == {"model", "server.log"}
    assert (folder / "model" / "config.json").is_file()
    assert "Using V2 Model Runner" in (folder / "server.log").read_text()


def test_no_process_is_left(finished: Demo) -> None:
    assert finished.servers() == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_server_starts_leaves_nothing(
    start, number: signal.Signals
) -> None:
    one = start()
    one.read_until("starting vllm serve", START_S)
    one.note_server()
    one.process.send_signal(number)
    assert one.finish(STOP_S) == 130
    assert one.servers() == {}
    assert one.left_behind() == []


def test_interrupting_an_answer_leaves_nothing(start) -> None:
    one = start(max_tokens=512)
    one.read_until("model> ", START_S)
    one.note_server()
    assert len(one.servers()) >= 2
    one.process.send_signal(signal.SIGINT)
    assert one.finish(STOP_S) == 130
    assert "What served this" not in one.output()
    assert one.servers() == {}
    assert one.left_behind() == []


def test_the_death_of_the_engine_is_explained(start) -> None:
    one = start(max_tokens=512)
    one.read_until("model> ", START_S)
    one.note_server()
    [engine] = [pid for pid, name in one.servers().items() if "EngineCore" in name]
    os.kill(engine, signal.SIGKILL)
    assert one.finish(STOP_S) == 1
    error = one.error()
    assert re.search(r"error: the (server ended|answer broke off)", error)
    assert "its log ends:\n  | " in error
    assert "\nTraceback (most recent call last):" not in error
    log = Path(re.findall(r"remedy: the whole log is (.+)", error)[0])
    assert "EngineCore" in log.read_text()
    assert one.servers() == {}
    assert [path.name for path in log.parent.iterdir()] == ["server.log"]
