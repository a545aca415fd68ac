# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Writing that either happens completely or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from .paths import scratch

_CHUNK_BYTES = 1 << 20


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _put(path: Path, content: bytes, staging: Path) -> None:
    """Write through a staged file on the same disk, then rename."""
    temporary = staging / "incoming"
    temporary.write_bytes(content)
    temporary.chmod(0o644)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.replace(temporary, path)


def _remove_empty_parents(path: Path, root: Path) -> None:
    parent = path.parent
    while parent != root and root in parent.parents:
        with suppress(OSError):
            parent.rmdir()
        if parent.exists():
            return
        parent = parent.parent


def replace_files(root: Path, changes: Mapping[str, bytes | None]) -> list[str]:
    """Write and delete several files together: all of them, or none.

    Args:
        root: Folder that the names are relative to.
        changes: New content by name; None deletes the file.

    Returns:
        The names whose content really changed.
    """
    changed = []
    for name, content in sorted(changes.items()):
        path = root / name
        now = path.read_bytes() if path.is_file() else None
        if now != content:
            changed.append(name)
    if not changed:
        return []
    build = root / "build"
    made = not build.exists()
    with scratch(build / "staging") as staging:
        backup = staging / "backup"
        done: list[str] = []
        try:
            for name in changed:
                path = root / name
                if path.is_file():
                    (backup / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, backup / name)
                done.append(name)
                content = changes[name]
                if content is None:
                    path.unlink()
                    _remove_empty_parents(path, root)
                else:
                    _put(path, content, staging)
        except BaseException:
            for name in done:
                path = root / name
                if (backup / name).is_file():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(backup / name, path)
                else:
                    with suppress(FileNotFoundError):
                        path.unlink()
            raise
    if made:
        with suppress(OSError):
            build.rmdir()
    return changed
