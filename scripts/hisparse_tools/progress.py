# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Progress lines with times, a bar, and the names of many short steps."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_REDRAW_S = 0.1
_BAR_AFTER_S = 0.5
_LINE_EVERY_S = 10.0


def say(text: str = "") -> None:
    """Print one line at once, so that it never trails a child's output."""
    print(text, flush=True)


@contextmanager
def step(title: str) -> Iterator[None]:
    """Announce a step, and print how long it took when it succeeded.

    Args:
        title: What is being done, as a verb phrase.
    """
    start = time.monotonic()
    say(f"- {title}")
    yield
    say(f"  done in {time.monotonic() - start:.1f} s")


class Bar:
    """A bar on a terminal; nothing at all elsewhere, so that logs stay readable."""

    def __init__(self, title: str, total: int, stream: TextIO | None = None) -> None:
        """Start a bar.

        Args:
            title: Short text in front of the bar.
            total: The amount that means complete; zero draws nothing.
            stream: Where to draw; standard error when omitted.
        """
        self._title = title
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._live = total > 0 and self._stream.isatty()
        self._start = time.monotonic()
        self._drawn = 0.0
        self._done = 0
        self._visible = False

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *exc: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Take the bar away until it is drawn again, to make room for a line."""
        if self._visible:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._visible = False

    def advance(self, amount: int) -> None:
        """Add ``amount`` to what is done and redraw if it is time to."""
        self._done += amount
        now = time.monotonic()
        if (
            not self._live
            or now - self._drawn < _REDRAW_S
            or now - self._start < _BAR_AFTER_S
        ):
            return
        self._drawn = now
        self._visible = True
        share = min(1.0, self._done / self._total)
        width = max(10, min(40, shutil.get_terminal_size().columns - 40))
        full = int(share * width)
        bar = "#" * full + "." * (width - full)
        self._stream.write(f"\r  {self._title} [{bar}] {share:4.0%}")
        self._stream.flush()


class Steps:
    """Many steps with names: one line on a terminal, elsewhere a line now and then."""

    def __init__(self, title: str, total: int, stream: TextIO | None = None) -> None:
        """Start; nothing is written yet.

        Args:
            title: What is being done.
            total: How many steps there are.
            stream: Where to write; standard error when omitted.
        """
        self._title = title
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._written: float | None = None
        self._begun = 0

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live and self._begun:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def begin(self, name: str) -> None:
        """Say that the next step begins, if it is time to."""
        self._begun += 1
        now = time.monotonic()
        every_s = _REDRAW_S if self._live else _LINE_EVERY_S
        if self._written is not None and now - self._written < every_s:
            return
        self._written = now
        line = f"  {self._title}, {self._begun} of {self._total}: {name}"
        if self._live:
            # A line that wraps could not be written over.
            line = f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K"
        else:
            line += "\n"
        self._stream.write(line)
        self._stream.flush()
