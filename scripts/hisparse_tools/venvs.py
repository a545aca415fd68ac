# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Virtual environments that are complete or absent, never half-made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .errors import ToolError
from .paths import scratch


def venv_python(folder: Path) -> Path:
    """Return the interpreter of an environment."""
    return folder / "bin" / "python"


def _retarget(folder: Path, old: str, new: str) -> None:
    """Make scripts name the folder's final place instead of the temporary one."""
    for path in [folder / "pyvenv.cfg", *(folder / "bin").iterdir()]:
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        changed = content.replace(old.encode(), new.encode())
        if changed != content and b"\0" not in content:
            path.write_bytes(changed)


def make_venv(folder: Path, fill: Callable[[Path], None], *options: str) -> None:
    """Make a virtual environment in one rename.

    Args:
        folder: Where it is to be; must not exist.
        fill: Called with the interpreter to install what is needed.
        options: Further options of ``python -m venv``.

    Raises:
        ToolError: If this Python cannot make environments.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch(folder.parent / "tmp") as temporary:
        made = temporary / "venv"
        command = [sys.executable, "-m", "venv", *options, str(made)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            raise ToolError(
                f"{sys.executable} cannot make a virtual environment: "
                + (done.stdout.strip().splitlines() or ["no message"])[0],
                "install the venv module (Debian, Ubuntu: apt-get install "
                "python3-venv)",
            )
        fill(venv_python(made))
        _retarget(made, str(made), str(folder))
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(made, folder)
