# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What the demo shows while it waits, and text that cannot harm a terminal."""

from __future__ import annotations

import re
import shutil
import sys

from hisparse_tools.progress import say


def printable(text: str) -> str:
    """No control characters: a byte-level model may well emit an escape sequence."""
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


class Waiting:
    """Shows what is waited for: in place on a terminal, else now and then."""

    # "(EngineCore pid=7) INFO 11-30 12:00:00 [core.py:1] ": of no use to a reader.
    _PREFIX = re.compile(r"^(?:\(.*?\) )?INFO [\d:. -]+ \[[^\]]*\] (?=[A-Z])")

    def __init__(self, doing: str = "importing") -> None:
        self._in_place = sys.stdout.isatty()
        self._next_s = 0.0
        self._doing = doing

    def __call__(self, waited_s: float, line: str) -> None:
        """Show the seconds waited and what a log's last line says, if it is time to.

        Warnings and continued lines are passed over.
        """
        message, is_news = self._PREFIX.subn("", line)
        if is_news:
            self._doing = message
        self.show(waited_s, self._doing)

    def show(self, waited_s: float, text: str) -> None:
        """Show the seconds waited and a text, if it is time to."""
        if waited_s < self._next_s:
            return
        self._next_s = waited_s + (0.5 if self._in_place else 10)
        width = max(40, shutil.get_terminal_size().columns - 1)
        text = f"  {waited_s:3.0f} s  {printable(text)}"[:width]
        if self._in_place:
            print(f"\r\x1b[K{text}", end="", flush=True)
        elif waited_s > 1:
            say(text)

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._in_place:
            print("\r\x1b[K", end="", flush=True)
