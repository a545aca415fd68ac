# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Where things live: the project, the cache, and scratch folders."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import ToolError


@dataclass(frozen=True)
class Project:
    """The folders and files of one checkout of this project."""

    root: Path

    @property
    def pins_file(self) -> Path:
        """The only place for version, hashes and tree ids."""
        return self.root / "upstream.toml"

    @property
    def patches(self) -> Path:
        """Folder of ``series`` and the patches."""
        return self.root / "patches"

    @property
    def overlay(self) -> Path:
        """Folder that mirrors ``vllm/``."""
        return self.root / "vllm_overlay"

    @property
    def readme(self) -> Path:
        """The page for users, with the generated patch table."""
        return self.root / "README.md"

    @property
    def dist(self) -> Path:
        """Where built wheels go."""
        return self.root / "dist"

    @property
    def source(self) -> Path:
        """The default maintainer's tree."""
        return self.root / "build" / "source"

    @property
    def locks(self) -> Path:
        """Folder of the pinned requirements."""
        return self.root / "ci"


def this_project() -> Project:
    """Return the project that holds these tools."""
    return Project(Path(__file__).resolve().parents[2])


def user_path(text: str) -> Path:
    """Return a path of the command line: relative to where ``run`` was called."""
    return Path(os.environ.get("HISPARSE_CALLED_FROM", ""), text)


def cache_dir() -> Path:
    """Return the cache folder, created if need be.

    ``HISPARSE_CACHE``, else ``hybrid-hisparse`` in ``XDG_CACHE_HOME`` or ``~/.cache``.

    Raises:
        ToolError: If it cannot be created or written.
    """
    named = os.environ.get("HISPARSE_CACHE")
    if named:
        path = Path(named)
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(
            os.path.expanduser("~"), ".cache"
        )
        path = Path(base) / "hybrid-hisparse"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolError(
            f"the cache folder {path} cannot be created: {error.strerror}",
            "set HISPARSE_CACHE to a folder that can be written",
        ) from error
    if not os.access(path, os.W_OK):
        raise ToolError(
            f"the cache folder {path} cannot be written",
            "set HISPARSE_CACHE to a folder that can be written",
        )
    return path.resolve()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _sweep(parent: Path) -> None:
    """Remove what killed processes left: folders are named after their process."""
    for path in parent.iterdir():
        pid = path.name.split("-", 1)[0]
        if pid.isdigit() and not _is_running(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _new_folder(parent: Path) -> Path:
    while True:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        try:
            return Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=parent))
        except FileNotFoundError:
            # another process has just finished, and removed the empty parent
            continue


@contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """Yield an empty folder that is removed afterwards, whatever happens.

    Args:
        parent: Where to make it (the same disk as the result, so that a rename
            suffices); the cache when omitted.
    """
    if parent is None:
        parent = cache_dir() / "tmp"
    path = _new_folder(parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            parent.rmdir()
