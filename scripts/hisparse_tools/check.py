# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Rules that every patch must keep, read from the files alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .message import (
    AREAS,
    KNOWN_TRAILERS,
    REQUIRED_TRAILERS,
    SECTIONS,
    area_prefixes,
    patch_name,
)
from .series import Patch, Series

MAX_LINES = 30
MAX_FILES = 3
SUBJECT_COLUMNS = 72

_SIGN_OFF = re.compile(r"[^<>]+ <[^<>@ ]+@[^<>@ ]+>")


@dataclass(frozen=True)
class Problem:
    """A broken rule."""

    patch: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.patch}: {self.text}\n  remedy: {self.remedy}"


@dataclass(frozen=True)
class Diff:
    """The size of a patch.

    Attributes:
        files: Files it changes, in order.
        lines: Added plus removed lines by file.
    """

    files: tuple[str, ...]
    lines: dict[str, int]


def read_diff(content: bytes) -> Diff:
    """Count a patch's changed lines, file by file."""
    lines: dict[str, int] = {}
    current = None
    left = [0, 0]
    for raw in content.decode("utf-8", "replace").split("\n"):
        header = re.fullmatch(r"diff --git (\"?)a/(.*)\1 (\"?)b/(.*)\3", raw)
        hunk = re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", raw)
        if left[0] or left[1]:
            if raw.startswith("-"):
                left[0] -= 1
            elif raw.startswith("+"):
                left[1] -= 1
            elif not raw.startswith("\\"):
                left = [left[0] - 1, left[1] - 1]
            if current is not None and raw[:1] in ("-", "+"):
                lines[current] += 1
        elif header:
            current = header[4]
            lines[current] = 0
        elif hunk:
            left = [int(hunk[1] or 1), int(hunk[2] or 1)]
    return Diff(tuple(lines), lines)


def _check_fields(patch: Patch) -> list[Problem]:
    message, name = patch.message, patch.name
    found = []

    def problem(text: str, remedy: str) -> None:
        found.append(Problem(name, text, remedy))

    if message.area is None or not area_prefixes(message.area):
        words = ", ".join(word for words in AREAS.values() for word in words)
        problem(
            f"subject '{message.subject}' does not read 'area: verb object'",
            f"start it with one of: {words}",
        )
    if len(message.subject) > SUBJECT_COLUMNS:
        problem(
            f"subject has {len(message.subject)} characters",
            f"keep it to {SUBJECT_COLUMNS}",
        )
    for section in SECTIONS:
        if not message.section(section):
            problem(
                f"no '{section}:' section", f"say it in a paragraph '{section}: ...'"
            )
    for key in REQUIRED_TRAILERS:
        if not message.value(key):
            problem(f"no '{key}:' trailer", "add it to the message's last paragraph")
    for key, _ in message.trailers:
        if key not in KNOWN_TRAILERS:
            problem(f"unknown trailer '{key}:'", f"use: {', '.join(KNOWN_TRAILERS)}")
    for value in message.values("Signed-off-by"):
        if not _SIGN_OFF.fullmatch(value):
            problem(f"'Signed-off-by: {value}' is no name and mail", "git commit -s")
    return found


def _check_number(patch: Patch) -> list[Problem]:
    number = patch.message.value("Patch") or ""
    found = []
    prefixes = area_prefixes(patch.message.area)
    if number and prefixes and not number.startswith(tuple(prefixes)):
        found.append(
            Problem(
                patch.name,
                f"id {number} is not of area '{patch.message.area}'",
                f"ids of that area start with {' or '.join(prefixes)}",
            )
        )
    if patch_name(patch.message) != patch.name:
        found.append(
            Problem(
                patch.name,
                "the name does not follow from the message "
                f"({patch_name(patch.message)})",
                "let 'nox -s refresh' write the patches",
            )
        )
    return found


def _check_size(patch: Patch) -> list[Problem]:
    diff = read_diff(patch.content)
    files = [path for path in diff.files if not path.startswith("tests/")]
    lines = sum(diff.lines[path] for path in files)
    found = []
    big = lines > MAX_LINES or len(files) > MAX_FILES
    if big and not patch.message.value("Size-reason"):
        found.append(
            Problem(
                patch.name,
                f"{lines} changed lines in {len(files)} files",
                f"keep to {MAX_LINES} lines and {MAX_FILES} files: move the body to "
                "the overlay, split the patch, or give a 'Size-reason:' trailer",
            )
        )
    return found


def _check_carried(patch: Patch) -> list[Problem]:
    return [
        Problem(
            patch.name,
            f"changes {path}, which a repacked wheel cannot carry",
            "keep to vllm/ (and tests/)",
        )
        for path in read_diff(patch.content).files
        if not path.startswith(("vllm/", "tests/"))
    ]


def _check_tests(patch: Patch, root: Path) -> list[Problem]:
    found = []
    for value in patch.message.values("Tests"):
        for word in re.findall(r"tests/[A-Za-z0-9_./-]+", value):
            if not (root / word.rstrip(".")).exists():
                found.append(
                    Problem(
                        patch.name,
                        f"'Tests:' names {word}, which does not exist",
                        "name a file or folder under the project's tests/",
                    )
                )
    return found


def check_series(series: Series, root: Path) -> list[Problem]:
    """Return every rule that a patch of the series breaks.

    Args:
        series: What to check.
        root: The project's folder, where the tests that messages name must exist.
    """
    found: list[Problem] = []
    last = ""
    for patch in series.patches:
        for rule in (_check_fields, _check_number, _check_size, _check_carried):
            found += rule(patch)
        found += _check_tests(patch, root)
        number = patch.message.value("Patch") or ""
        if number and number <= last:
            found.append(
                Problem(
                    patch.name,
                    f"id {number} comes after {last}",
                    "order the commits by id: git rebase -i upstream",
                )
            )
        last = max(last, number)
    return found
