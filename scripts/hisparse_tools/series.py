# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The series as it lies in the project: ``patches/`` and ``vllm_overlay/``."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from email.header import decode_header, make_header
from pathlib import Path

from .errors import ToolError
from .message import Message, parse_message
from .paths import Project

NAME = re.compile(r"\d{4}-[a-z0-9-]+\.patch")
_LEFTOVERS = {"__pycache__", ".ruff_cache", ".mypy_cache", ".pytest_cache"}


@dataclass(frozen=True)
class Patch:
    """One file of the series.

    Attributes:
        name: File name.
        content: Its bytes, a mail as ``git format-patch`` writes it.
        message: Its message, taken apart.
    """

    name: str
    content: bytes
    message: Message


@dataclass(frozen=True)
class Series:
    """All patches in order, and the overlay.

    Attributes:
        patches: In the order of ``patches/series``.
        overlay: Content by path under the source's top (``vllm/...``).
    """

    patches: tuple[Patch, ...]
    overlay: dict[str, bytes]

    def digest(self) -> str:
        """Return a hash of everything in the series."""
        digest = hashlib.sha256()
        items = [(patch.name, patch.content) for patch in self.patches]
        for name, content in items + sorted(self.overlay.items()):
            digest.update(f"{len(name)} {name} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()

    def files(self) -> dict[str, bytes]:
        """Return the files that hold this series, by path in the project."""
        order = "".join(f"{patch.name}\n" for patch in self.patches)
        files = {"patches/series": order.encode()}
        for patch in self.patches:
            files[f"patches/{patch.name}"] = patch.content
        for path, content in self.overlay.items():
            files[f"vllm_overlay/{path.removeprefix('vllm/')}"] = content
        return files


def patch_message(content: bytes) -> Message:
    """Return the message of a patch file, without its mail headers."""
    text = content.decode("utf-8", "replace")
    headers, _, rest = text.partition("\n\n")
    subject = ""
    match = re.search(r"(?m)^Subject: (.*(?:\n[ \t].*)*)", headers)
    if match:
        # folded over lines, and encoded where it is not plain ASCII
        line = re.sub(r"\n[ \t]", " ", match[1])
        subject = str(make_header(decode_header(line)))
    body = re.split(r"(?m)^(?:---$|diff --git )", rest, maxsplit=1)[0]
    return parse_message(f"{subject}\n\n{body}")


def _read_overlay(folder: Path) -> dict[str, bytes]:
    overlay: dict[str, bytes] = {}
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _LEFTOVERS)
        for name in sorted(files):
            path = Path(where) / name
            if name.endswith(".pyc") or path == folder / ".gitkeep":
                continue
            if path.is_symlink():
                raise ToolError(
                    f"{path} is a symbolic link, which a wheel cannot carry",
                    "replace it by the file itself",
                )
            overlay[f"vllm/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
        for name in folders:
            if (Path(where) / name).is_symlink():
                raise ToolError(
                    f"{Path(where) / name} is a symbolic link, which a wheel cannot "
                    "carry",
                    "replace it by the folder itself",
                )
    return overlay


def _read_order(project: Project) -> list[str]:
    file = project.patches / "series"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ToolError(
            f"{file} cannot be read: {error.strerror}",
            "run this inside a complete checkout of the project",
        ) from error
    names = [line.strip() for line in lines]
    names = [name for name in names if name and not name.startswith("#")]
    for name in names:
        if not NAME.fullmatch(name):
            raise ToolError(
                f"patches/series names {name!r}, which is not NNNN-words.patch",
                "let 'nox -s refresh' write patches/series",
            )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ToolError(
            f"patches/series names {', '.join(twice)} more than once",
            "let 'nox -s refresh' write patches/series",
        )
    return names


def read_series(project: Project) -> Series:
    """Read patches and overlay, and check that nothing lies unlisted beside them.

    Raises:
        ToolError: If a listed patch is missing, or a patch is not listed.
    """
    names = _read_order(project)
    present = {path.name for path in project.patches.glob("*") if path.is_file()}
    missing = [name for name in names if name not in present]
    if missing:
        raise ToolError(
            f"patches/series names {missing[0]}, which does not exist",
            "restore the file from version control, or run 'nox -s refresh'",
        )
    stray = sorted(present - set(names) - {"series", ".gitkeep"})
    if stray:
        raise ToolError(
            f"patches/{stray[0]} is not named in patches/series",
            "remove it, or bring it in as a commit of 'nox -s source' and run "
            "'nox -s refresh'",
        )
    patches = []
    for name in names:
        content = (project.patches / name).read_bytes()
        patches.append(Patch(name, content, patch_message(content)))
    series = Series(tuple(patches), _read_overlay(project.overlay))
    check_owners(series)
    return series


def check_owners(series: Series) -> None:
    """Check that every overlay file belongs to exactly one patch.

    Raises:
        ToolError: If a file has no owner or two, or an owner has no such file.
    """
    owner: dict[str, str] = {}
    for patch in series.patches:
        for path in patch.message.overlay:
            short = path.removeprefix("vllm/")
            if path in owner:
                raise ToolError(
                    f"overlay file {short} is claimed by {owner[path]} and "
                    f"{patch.name}",
                    "keep one of the two Overlay: trailers",
                )
            if path not in series.overlay:
                raise ToolError(
                    f"{patch.name} claims overlay file {short}, which does not exist",
                    "add vllm_overlay/" + short + ", or drop the Overlay: trailer",
                )
            owner[path] = patch.name
    orphans = sorted(set(series.overlay) - set(owner))
    if orphans:
        short = orphans[0].removeprefix("vllm/")
        raise ToolError(
            f"no patch claims overlay file {short}",
            f"add 'Overlay: {short}' to the message of the patch that first needs it",
        )
