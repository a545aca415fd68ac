# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Progress is drawn on a terminal, and nowhere else."""

from __future__ import annotations

import io

import pytest

from hisparse_tools import progress
from hisparse_tools.progress import Bar, Steps


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_bar_on_a_terminal_is_drawn_and_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(0, 100, 1))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    stream = Terminal()
    with Bar("copying", 4, stream) as bar:
        bar.advance(1)
        bar.advance(1)
    assert "copying" in stream.getvalue()
    assert " 50%" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_short_work_draws_nothing() -> None:
    stream = Terminal()
    with Bar("copying", 4, stream) as bar:
        bar.advance(4)
    assert stream.getvalue() == ""


def test_log_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 100, 1))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    stream = io.StringIO()
    with Bar("copying", 4, stream) as bar:
        bar.advance(4)
    assert stream.getvalue() == ""


def test_steps_on_a_terminal_are_one_line_that_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    with Steps("compiling", 3, stream) as steps:
        steps.begin("one")
        steps.begin("a name that is too long for a line")
    assert stream.getvalue().split("\r") == [
        "",
        "  compiling, 1 of 3: one\x1b[K",
        "  compiling, 2 of 3: a name t\x1b[K",
        "\x1b[K",
    ]


def test_steps_elsewhere_are_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([100.0, 103.0, 109.9, 110.0, 119.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    stream = io.StringIO()
    with Steps("compiling", 5, stream) as steps:
        for name in ("one", "two", "three", "four", "five"):
            steps.begin(name)
    assert stream.getvalue().splitlines() == [
        "  compiling, 1 of 5: one",
        "  compiling, 4 of 5: four",
    ]


def test_no_steps_write_nothing() -> None:
    stream = Terminal()
    with Steps("compiling", 0, stream):
        pass
    assert stream.getvalue() == ""
