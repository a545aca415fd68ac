# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""A server never outlives its owner, and says why when it dies."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hisparse_tools import server as server_module
from hisparse_tools.errors import ToolError
from hisparse_tools.server import Server, session_processes

# Prints the id of a child that does not end by itself, then goes on.
WITH_CHILD = """
    import subprocess, sys, time
    sleep = "import time; time.sleep(600)"
    print(subprocess.Popen([sys.executable, "-c", sleep]).pid, flush=True)
"""
SLEEP = "time.sleep(600)"
STUBBORN = """
    import signal, time
    signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
    print("ready", flush=True)
"""
ANSWERING = """
    import http.server, sys
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"well")
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def code(*parts: str) -> list[str]:
    text = "\n".join(textwrap.dedent(part) for part in parts)
    return [sys.executable, "-c", text]


def make_server(tmp_path: Path, command: list[str], grace_s: float = 10) -> Server:
    return Server(command, tmp_path / "log", os.environ, tmp_path, grace_s)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in 20 s"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_its_children_are_ended_with_it(tmp_path: Path) -> None:
    with make_server(tmp_path, code(WITH_CHILD, SLEEP)) as server:
        wait_for(server.last_line)
        pids = [server.pid, int(server.last_line())]
        assert sorted(session_processes(server.pid)) == sorted(pids)
    assert not any(is_running(pid) for pid in pids)


def test_the_children_of_a_dead_server_are_ended_without_force(tmp_path: Path) -> None:
    """They are asked at once, not left alone until their time is up."""
    with make_server(tmp_path, code(WITH_CHILD)) as server:
        wait_for(lambda: server.status() is not None)
        child = int(server.last_line())
        assert is_running(child)
        start = time.monotonic()
    assert not is_running(child)
    assert time.monotonic() - start < 5


def test_a_child_that_ignores_the_request_is_killed(tmp_path: Path) -> None:
    # One that prints would end with the pipe to its parent.
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    parent = f"""
        import subprocess, sys
        command = {code(deaf, 'print("ready", flush=True); import time', SLEEP)!r}
        stubborn = subprocess.Popen(command, stdout=subprocess.PIPE)
        stubborn.stdout.readline()
        print(stubborn.pid, flush=True)
    """
    with make_server(tmp_path, code(parent), grace_s=0.3) as server:
        wait_for(lambda: server.status() is not None)
        child = int(server.last_line())
        assert is_running(child)
    assert not is_running(child)


def test_no_zombie_of_its_children_is_left(tmp_path: Path) -> None:
    """Orphans become this process's children, which has to reap them."""
    with make_server(tmp_path, code(WITH_CHILD)) as server:
        wait_for(lambda: server.status() is not None)
        child = int(server.last_line())
    assert not Path(f"/proc/{child}").exists()


def test_one_that_ignores_the_request_is_killed(tmp_path: Path) -> None:
    with make_server(tmp_path, code(STUBBORN, SLEEP), grace_s=0.3) as server:
        wait_for(server.last_line)
    assert server.status() == -signal.SIGKILL


def test_one_that_obeys_is_not_killed(tmp_path: Path) -> None:
    with make_server(tmp_path, code("import time", SLEEP)) as server:
        pass
    assert server.status() == -signal.SIGTERM


def test_an_error_inside_ends_it(tmp_path: Path) -> None:
    server = make_server(tmp_path, code(WITH_CHILD, SLEEP))
    with pytest.raises(KeyboardInterrupt), server:
        raise KeyboardInterrupt
    assert session_processes(server.pid) == []


def test_a_signal_during_the_start_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the child is being made: it arrives once the child is known."""
    original = subprocess.Popen

    def interrupted(*args: Any, **options: Any) -> subprocess.Popen:
        os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **options)

    monkeypatch.setattr(server_module.subprocess, "Popen", interrupted)
    server = make_server(tmp_path, code("import time", SLEEP))
    # The kernel gives a signal to any thread that takes it.
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            server.__enter__()
    finally:
        done.set()
        other.join()
    assert session_processes(server.pid) == []
    assert server.status() is not None


def test_a_second_interrupt_does_not_abort_the_cleaning_up(tmp_path: Path) -> None:
    script = f"""
        import os, sys, threading, signal, time
        from pathlib import Path
        from hisparse_tools.server import Server
        command = {code(STUBBORN, SLEEP)!r}
        with Server(command, Path("log"), os.environ, Path("."), 1.0) as server:
            while server.last_line() != "ready":
                time.sleep(0.02)
            print(server.pid, flush=True)
            time.sleep(600)
    """
    owner = start_owner(script, tmp_path)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.send_signal(signal.SIGINT)
    wait_for(lambda: "asked" in (tmp_path / "log").read_text())
    owner.send_signal(signal.SIGINT)
    owner.wait(20)
    assert not is_running(pid)


def test_an_owner_that_is_killed_outright_takes_it_along(tmp_path: Path) -> None:
    script = f"""
        import os, time
        from pathlib import Path
        from hisparse_tools.server import Server
        command = {code("import time", SLEEP)!r}
        with Server(command, Path("log"), os.environ, Path(".")) as server:
            print(server.pid, flush=True)
            time.sleep(600)
    """
    owner = start_owner(script, tmp_path)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait(20)
    wait_for(lambda: not is_running(pid))


def test_ending_with_the_parent_goes_on_in_another_program(tmp_path: Path) -> None:
    """As the demo does: it executes the session in its own place."""
    child = f"""
        import os, sys
        from hisparse_tools.server import end_with_parent
        end_with_parent()
        print(os.getpid(), flush=True)
        os.execv(sys.executable, {code("import time", SLEEP)!r})
    """
    owner = start_owner(f"import subprocess; subprocess.run({code(child)!r})", tmp_path)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait(20)
    wait_for(lambda: not is_running(pid))


def start_owner(script: str, cwd: Path) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": str(Path(server_module.__file__).parents[1])}
    return subprocess.Popen(
        code(script),
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def test_it_is_ready_when_it_answers(tmp_path: Path, unused_tcp_port: int) -> None:
    command = [*code(ANSWERING), str(unused_tcp_port)]
    with make_server(tmp_path, command) as server:
        server.wait_until_ready(f"http://127.0.0.1:{unused_tcp_port}/", 20)
        assert server.status() is None


def test_a_death_while_starting_shows_the_log_and_names_it(tmp_path: Path) -> None:
    lines = "[print('line', i) for i in range(100)]; raise SystemExit(3)"
    with (
        make_server(tmp_path, code(lines)) as server,
        pytest.raises(ToolError) as caught,
    ):
        server.wait_until_ready("http://127.0.0.1:9/", 20)
    assert "ended with status 3 while starting" in caught.value.what
    assert "| line 99\n" in caught.value.before
    assert "line 10\n" not in caught.value.before
    assert str(tmp_path / "log") in caught.value.remedy


def test_a_death_by_a_signal_names_the_signal(tmp_path: Path) -> None:
    with make_server(tmp_path, code("import time", SLEEP)) as server:
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: server.status() is not None)
        with pytest.raises(ToolError, match="ended by SIGKILL while talking"):
            server.check("talking")


def test_waiting_is_bounded_and_reports_progress(tmp_path: Path) -> None:
    seen: list[tuple[float, str]] = []
    start = time.monotonic()
    with (
        make_server(
            tmp_path, code("print('hm', flush=True)", STUBBORN, SLEEP), 0.1
        ) as s,
        pytest.raises(ToolError, match="not ready after 1 s"),
    ):
        s.wait_until_ready("http://127.0.0.1:9/", 1, lambda *args: seen.append(args))
    assert time.monotonic() - start < 10
    assert seen[-1][0] > 0.5
    assert seen[-1][1] == "ready"


def test_a_program_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), make_server(tmp_path, ["/no/such/program"]):
        pass


@pytest.fixture
def unused_tcp_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
