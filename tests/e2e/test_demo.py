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
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

import demo_session
from hisparse_tools.demo_settings import CONVERSATIONS, DemoSettings, HiSparse
from hisparse_tools.env import cpu_run_env
from hisparse_tools.pins import Device
from hisparse_tools.served_by import Build
from hisparse_tools.server import session_processes

pytestmark = pytest.mark.slow

START_S = 300
STOP_S = 60
# Of an answer; so many that running requests outgrow the memory.
TOKENS = 40


def session_settings(**changes: object) -> DemoSettings:
    fields = {
        "device": Device.CPU,
        # Long enough for KV pressure, few enough tokens to generate.
        "messages": ("A message that is longer than some pages are. " * 4, "And?"),
        "max_tokens": TOKENS,
        "port": 0,
        "keep": False,
        "hisparse": HiSparse.OFF,
    }
    return DemoSettings(**(fields | changes))


class Demo:
    """A running session; what it prints, with the time when each piece came."""

    def __init__(self, folder: Path, settings: DemoSettings) -> None:
        self.folder = folder
        settings = replace(settings, out=str(folder / "picture"))
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
        self._servers: list[int] = []

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
        known = {"stderr", "picture"}
        return [path.name for path in self.folder.iterdir() if path.name not in known]

    def note_server(self) -> None:
        """Wait until a new server exists, and remember its session."""
        deadline = time.monotonic() + START_S
        while not (leaders := set(self._session_leaders()) - set(self._servers)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        self._servers += leaders

    def _session_leaders(self) -> list[int]:
        """Children that began a session of their own."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if os.getsid(int(child)) == int(child)]

    def servers(self) -> dict[int, str]:
        """The servers' processes that are alive, with their names."""
        found = [pid for server in self._servers for pid in session_processes(server)]
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
    """Conversations of two turns, held to their end with both servers."""
    one = Demo(temporary(), session_settings(keep=True, hisparse=HiSparse.COMPARE))
    try:
        for name in ("without", "with"):
            one.read_until(f"starting vllm serve {name} HiSparse", START_S)
            one.note_server()
        one.read_until("gibberish", START_S)
        assert one.finish(STOP_S) == 0, one.error()
    finally:
        one.process.kill()
    return one


def facts(one: Demo, name: str) -> list[str]:
    return re.findall(rf"^  {name} +(.+)$", one.output(), re.M)


def row(one: Demo, name: str) -> list[float]:
    """What the comparison says of each server, without units."""
    [text] = re.findall(rf"^ +{name}  +(.+)$", one.output(), re.M)
    values = text.replace(",", "").replace("%", "").split()
    return [float(value.replace("-", "nan")) for value in values]


def turns(one: Demo) -> list[list[int]]:
    """Turn, prompt tokens, cached tokens and new tokens of each turn."""
    rows = re.findall(r"^ +(\d+) +(\d+) +(\d+) +(\d+) +[\d.]+$", one.output(), re.M)
    return [[int(value) for value in row] for row in rows]


def answers(one: Demo) -> list[str]:
    return re.findall(r"^model> (.*)$", one.output(), re.M)


def test_every_message_is_answered_with_as_many_tokens_as_asked(finished: Demo) -> None:
    assert [row[3] for row in turns(finished)] == [TOKENS] * 4
    assert [len(answer) for answer in answers(finished)] == [TOKENS] * 4


def test_the_answers_come_in_pieces(finished: Demo) -> None:
    """At least one in three tokens was seen before the next one came."""
    pieces = [piece for piece in finished.pieces if 0 < len(piece) < 4]
    assert len(pieces) > 2 * 2 * TOKENS // 3


def test_later_turns_find_whole_pages_of_earlier_ones(finished: Demo) -> None:
    """With HiSparse all of them; without, what pressure left."""
    without, later_without, first, later = turns(finished)
    assert without[2] == first[2] == 0
    # Only whole pages are kept, and the last token is not yet among them.
    assert later[2] == (first[1] + TOKENS - 1) // 16 * 16
    assert later_without[2] <= later[2] < later[1] == later_without[1]


def test_only_hisparse_spares_preemptions(finished: Demo) -> None:
    without, with_hisparse = row(finished, "preemptions")
    assert without >= 1 and with_hisparse == 0
    assert row(finished, "after a preemption")[1] == 0
    without, with_hisparse = row(finished, "recomputed tokens")
    assert without > with_hisparse
    # The last page of each first turn, which was not full.
    assert with_hisparse <= CONVERSATIONS * 16


def test_with_hisparse_every_conversation_runs(finished: Demo) -> None:
    assert row(finished, "requests running, most")[1] == CONVERSATIONS
    without, with_hisparse = row(finished, "requests running, mean")
    assert 1 <= without < with_hisparse <= CONVERSATIONS


def test_rows_and_pages_were_moved(finished: Demo) -> None:
    assert 0 < row(finished, "hot buffer hit rate")[1] < 100
    for name in ("bytes to the host", "bytes from the host"):
        without, with_hisparse = row(finished, name)
        assert without == 0 and with_hisparse > 10**6


def test_outputs_are_compared_and_equal(finished: Demo) -> None:
    count = 2 * CONVERSATIONS
    assert (
        f"outputs: equal, {count} answers, {TOKENS * count} tokens" in finished.output()
    )
    assert answers(finished)[:2] == answers(finished)[2:]


def test_the_picture_shows_pages_that_are_on_the_host_only(finished: Demo) -> None:
    path = finished.folder / "picture" / "pages.svg"
    assert f"pages by residency over time: {path}" in finished.output()
    root = ElementTree.parse(path).getroot()
    areas = [e for e in root.iter() if e.get("class") == "host" and e.get("points")]
    heights = [
        {pair.split(",")[1] for pair in str(area.get("points")).split()}
        for area in areas
    ]
    # Nothing without HiSparse; with it, more than nothing at times.
    assert len(heights) == 2 and len(heights[1]) > 3
    assert [path.name for path in path.parent.iterdir()] == ["pages.svg"]


def test_the_page_names_the_installed_build(finished: Demo) -> None:
    build = Build.installed()
    assert facts(finished, "vLLM") == [build.version]
    [text] = facts(finished, "build")
    assert build.tree in text


def test_the_page_names_what_served(finished: Demo) -> None:
    assert facts(finished, "model runner") == ["V2"]
    assert facts(finished, "attention") == ["CPU_MLA_SPARSE"]
    assert facts(finished, "device") == ["cpu"]
    assert facts(finished, "residency") == [
        "full: HiSparse off",
        "full or mixed by need: HiSparse on",
    ]


def test_the_page_says_that_the_text_means_nothing(finished: Demo) -> None:
    assert "gibberish" in finished.output()


def test_keeping_leaves_model_and_logs_and_nothing_else(finished: Demo) -> None:
    [name] = finished.left_behind()
    folder = finished.folder / name
    assert f"kept {folder}" in finished.output()
    logs = {"server-without-hisparse.log", "server-with-hisparse.log"}
    assert {path.name for path in folder.iterdir()} == {"model", *logs}
    assert (folder / "model" / "config.json").is_file()
    for log in logs:
        assert "Using V2 Model Runner" in (folder / log).read_text()


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
    assert error.startswith("the server's log ends:\n  | ")
    # The last two lines, whatever the log holds.
    *_, what, remedy = error.splitlines()
    assert re.match(r"error: (the server ended|an answer broke off)", what)
    assert remedy.startswith("remedy: the whole log is ")
    assert "\nTraceback (most recent call last):" not in error
    log = Path(re.findall(r"remedy: the whole log is (.+)", error)[0])
    assert "EngineCore" in log.read_text()
    assert one.servers() == {}
    assert [path.name for path in log.parent.iterdir()] == [
        "server-without-hisparse.log"
    ]
