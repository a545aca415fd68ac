# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Generated tables in Markdown files, between two marks."""

from __future__ import annotations

from .errors import ToolError
from .series import Series

BEGIN = "<!-- patches:begin (written by nox -s refresh) -->"
END = "<!-- patches:end -->"


def patch_table(series: Series) -> str:
    """Return the table's Markdown text."""
    if not series.patches:
        return "The series is empty.\n"
    rows = ["| patch | what it does | goes when |", "| --- | --- | --- |"]
    for patch in series.patches:
        message = patch.message
        cells = (
            f"[{message.value('Patch')}](patches/{patch.name})",
            message.subject,
            message.value("Remove-when") or "",
        )
        rows.append(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        )
    return "\n".join(rows) + "\n"


def with_table(text: str, series: Series) -> str:
    """Return README's text with the table brought up to date.

    Raises:
        ToolError: If the two marks are missing.
    """
    return between(text, BEGIN, END, patch_table(series), "README.md")


def between(text: str, begin: str, end: str, table: str, name: str) -> str:
    """Return a file's text with the table between two marks replaced.

    Raises:
        ToolError: If the two marks are missing.
    """
    head, has_begin, rest = text.partition(begin)
    _, has_end, tail = rest.partition(end)
    if not has_begin or not has_end:
        raise ToolError(
            f"{name} has lost the marks of its table",
            f"put these two lines back where the table goes: {begin} and {end}",
        )
    return f"{head}{begin}\n{table}{end}{tail}"
