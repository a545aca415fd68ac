# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""A server as a child that leaves nothing behind, whatever ends its owner."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from .errors import ToolError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_Handler = signal.Handlers | Callable[[int, FrameType | None], object]
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None).prctl
_POLL_S = 0.1
_TAIL_LINES = 25

# Not through a proxy: the server is on this machine.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent ends.

    A program that it executes in its place keeps this; its children do not.
    """
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def http_get(url: str, timeout_s: float = 5.0) -> str | None:
    """Return the body of a successful answer, or None where there is none."""
    try:
        with _DIRECT.open(url, timeout=timeout_s) as response:
            return response.read().decode("utf-8", "replace")
    except (OSError, urllib.error.URLError):
        return None


def session_processes(session: int) -> list[int]:
    """Return the ids of the live processes of a session; zombies are not alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        # The name, in parentheses, may hold anything; state, parent, group and
        # session come after it.
        state, _, _, its_session = stat.rpartition(")")[2].split()[:4]
        if int(its_session) == session and state not in "ZX":
            found.append(int(entry.name))
    return found


@contextmanager
def _stop_signals_go_to(handler: _Handler) -> Iterator[None]:
    """Handle the stop signals otherwise; only the main thread may, others go on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, original in before.items():
            signal.signal(number, original)


@contextmanager
def _later() -> Iterator[None]:
    """Hold the stop signals back, whichever thread they reach, until the end."""
    arrived: list[int] = []
    try:
        with _stop_signals_go_to(lambda number, frame: arrived.append(number)):
            yield
    finally:
        if arrived:
            signal.raise_signal(arrived[0])


class Server:
    """A command in a session of its own, stopped with all its children on exit.

    Used as a context manager. If this process is killed outright, the kernel
    terminates the command.

    Attributes:
        log: File with everything that the command and its children print.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        cwd: Path,
        grace_s: float = 15.0,
    ) -> None:
        """Describe the command; nothing is started yet.

        Args:
            command: Program and arguments.
            log: File to write; its folder must exist.
            env: The whole environment.
            cwd: Working folder.
            grace_s: How long the command, and then its children, may take to end
                when asked, before they are killed.
        """
        self.log = log
        self._command = list(command)
        self._env = dict(env)
        self._cwd = cwd
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The command's process id, which is its session's too."""
        assert self._process is not None, "the server has not been started"
        return self._process.pid

    def _start(self) -> None:
        parent = os.getpid()
        # Orphans of the command become this process's children, which reaps them: not
        # every machine's first process does.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)

        def in_child() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        # A signal between the fork and the assignment would lose the child.
        with open(self.log, "wb") as log, _later():
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=self._cwd,
                start_new_session=True,
                preexec_fn=in_child,
            )

    def status(self) -> int | None:
        """Return the command's exit status, or None while it runs."""
        assert self._process is not None, "the server has not been started"
        return self._process.poll()

    def last_line(self) -> str:
        """Return the log's last line that is not empty."""
        return next(iter(self._last_lines(1)), "")

    def _last_lines(self, count: int) -> list[str]:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return lines[-count:]

    def check(self, doing: str) -> None:
        """Raise if the command has ended.

        Args:
            doing: What was going on, for the message.

        Raises:
            ToolError: With the end of the log, and where the log is.
        """
        status = self.status()
        if status is None:
            return
        how = f"with status {status}"
        if status < 0:
            how = f"by {signal.Signals(-status).name}"
        raise self.error(f"the server ended {how} while {doing}")

    def error(self, what: str) -> ToolError:
        """Return an error that shows the end of the log and names the log."""
        tail = "\n".join(f"  | {line}" for line in self._last_lines(_TAIL_LINES))
        return ToolError(
            what,
            f"the whole log is {self.log}",
            before=f"the server's log ends:\n{tail or '  | (empty)'}\n",
        )

    def wait_until_ready(
        self,
        url: str,
        timeout_s: float,
        progress: Callable[[float, str], None] = lambda waited_s, line: None,
    ) -> None:
        """Wait until `url` answers.

        Args:
            url: Where the server says that it is well.
            timeout_s: How long to wait.
            progress: Called often with the seconds waited and the log's last line.

        Raises:
            ToolError: If the server ends, or is not ready in time.
        """
        start = time.monotonic()
        while http_get(url) is None:
            self.check("starting")
            waited_s = time.monotonic() - start
            if waited_s > timeout_s:
                raise self.error(f"the server is not ready after {timeout_s:.0f} s")
            progress(waited_s, self.last_line())
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End the command and every process of its session; idempotent.

        The command is asked first, so that it can end its children in order; then they
        are; whatever is left is killed. Takes at most two grace periods.
        """
        if self._process is None:
            return
        # A second Ctrl-C must not abort the cleaning up.
        with _stop_signals_go_to(signal.SIG_IGN):
            self._process.terminate()
            self._within_grace(lambda: self.status() is not None)
            self._signal_all(signal.SIGTERM)
            if not self._within_grace(lambda: not session_processes(self.pid)):
                self._signal_all(signal.SIGKILL)
            self._process.wait()
            self._within_grace(lambda: not session_processes(self.pid))
            self._reap()

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while os.waitpid(-self.pid, os.WNOHANG)[0]:
                continue
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def _signal_all(self, number: int) -> None:
        for pid in session_processes(self.pid):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _within_grace(self, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + self._grace_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True
