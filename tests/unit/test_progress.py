# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Progress is drawn on a terminal, and nowhere else."""

from __future__ import annotations

import io

import pytest

from hisparse_tools import progress
from hisparse_tools.progress import Bar


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
