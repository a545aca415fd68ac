# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The environment that the demo uses on a machine with CUDA."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from .atomic import sha256_of
from .errors import ToolError
from .paths import cache_dir
from .progress import step
from .venvs import make_venv, venv_python

# A user's own modules must not shadow the installed ones, and kernels are to run on the
# GPU even if the shell is set up for the CPU.
_DROPPED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "TRITON_INTERPRET")


def cuda_run_env() -> dict[str, str]:
    """Return this process's environment with the settings for a CUDA run."""
    env = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    env |= {"PYTHONNOUSERSITE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    # The model is a local folder: nothing is to be fetched.
    return env | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def _fill(python: Path, wheel: Path) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check"]
    command += ["install", "--no-compile", str(wheel)]
    env = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    if subprocess.run(command, env=env).returncode:
        raise ToolError(
            f"pip could not install {wheel.name} and what it requires (its messages "
            "are above)",
            "check the network, the free space (about 15 GB), and pip's settings "
            "(pip config list); or give --device cpu",
        )


def ensure_cuda_env(wheel: Path) -> Path:
    """Return the interpreter of an environment with a CUDA build in it.

    Made once per build. Unlike the CPU environment, it has the requirements that the
    wheel itself states, at the versions that pip chooses.

    Args:
        wheel: A wheel from `build`, for CUDA.

    Raises:
        ToolError: If pip fails.
    """
    folder = cache_dir() / "venvs" / f"cuda-{sha256_of(wheel)[:16]}"
    if not venv_python(folder).exists():
        with step(f"installing {wheel.name} and its requirements (once, several GB)"):
            make_venv(folder, lambda python: _fill(python, wheel))
    return venv_python(folder)
