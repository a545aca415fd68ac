# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The patch table in ``README.md``, generated from the patches' messages."""

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
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ToolError(
            "README.md has lost the marks of its patch table",
            f"put these two lines back where the table goes: {BEGIN} and {END}",
        )
    return f"{head}{BEGIN}\n{patch_table(series)}{END}{tail}"
