# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The CPU environment that tests and demo share, and its settings.

Two layers, so that a new build never pulls the floor from under a running server: the
pinned requirements, made once and shared, and over them one small environment per built
wheel.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .atomic import sha256_of
from .errors import ToolError
from .paths import Project, cache_dir
from .progress import say, step
from .venvs import make_venv, venv_python

OLDEST_PYTHON = (3, 11)
_KEPT_BUILDS = 3

# One OpenMP thread, not bound: on a shared machine the defaults make every step forty
# times slower. The interpreter makes Triton kernels run on the CPU. Nothing is fetched.
CPU_RUN_ENV = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def cpu_run_env() -> dict[str, str]:
    """Return this process's environment with the settings for a CPU run."""
    env = {**os.environ, **CPU_RUN_ENV}
    env.setdefault("VLLM_CACHE_ROOT", str(cache_dir() / "vllm"))
    env.setdefault("VLLM_CONFIG_ROOT", str(cache_dir() / "vllm-config"))
    env.setdefault("TRITON_CACHE_DIR", str(cache_dir() / "triton"))
    # A user's own modules must not shadow the pinned ones.
    for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP"):
        env.pop(name, None)
    env["PYTHONNOUSERSITE"] = "1"
    return env


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, so that two sessions do not make the same thing twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("  waiting for another session that is making the same environment")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _pip(python: Path, *args: str, target: Path | None = None) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check"]
    if target is not None:
        command += ["--python", str(target)]
    # Compiled lazily on import: compiling all of it takes longer than a test run.
    command += ["install", "--no-compile", *args]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    # On a terminal pip shows its own progress bars; a log gets a line per download.
    shown = sys.stdout.isatty()
    process = subprocess.Popen(
        command,
        env=env,
        stdout=None if shown else subprocess.PIPE,
        stderr=None if shown else subprocess.STDOUT,
        text=True,
    )
    lines = []
    try:
        for line in process.stdout or ():
            lines.append(line)
            if line.startswith("Downloading ") or line.startswith("  Downloading "):
                say(f"  {line.strip()}")
        status = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if status:
        sys.stderr.writelines(lines[-30:])
        raise ToolError(
            "pip could not install the CPU environment (its messages are above)",
            "check the network, the free space, and pip's proxy and index settings "
            "(pip config list)",
        )


def _key(*parts: str) -> str:
    text = "\n".join([*parts, sys.version, sys.base_prefix])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def requirements_env(
    lock: Path,
    name: str,
    *options: str,
    finish: Callable[[Path], None] = lambda site: None,
) -> Path:
    """Return the interpreter of an environment with pinned requirements.

    Args:
        lock: The requirements file.
        name: First part of the folder's name.
        options: Further options of ``pip install``.
        finish: Called once with the new environment's ``site-packages``.
    """

    def fill(python: Path) -> None:
        _pip(python, "-r", str(lock), *options)
        finish(site_packages(python))

    text = lock.read_text(encoding="utf-8")
    folder = cache_dir() / "venvs" / f"{name}-{_key(text, *options)}"
    if venv_python(folder).exists():
        return venv_python(folder)
    with _locked(folder.with_name(folder.name + ".lock")):
        if not venv_python(folder).exists():
            with step(f"making an environment from {lock.name} (once)"):
                make_venv(folder, fill)
    return venv_python(folder)


def site_packages(python: Path) -> Path:
    """Return the ``site-packages`` of an environment of this Python version."""
    major, minor = sys.version_info[:2]
    return python.parents[1] / "lib" / f"python{major}.{minor}" / "site-packages"


def _fill_build(base: Path, python: Path, wheel: Path) -> None:
    line = f"import site; site.addsitedir({str(site_packages(base))!r})\n"
    (site_packages(python) / "hisparse_requirements.pth").write_text(line)
    _pip(base, "--no-deps", "--no-index", str(wheel), target=python)


def _prune(folder: Path, pattern: str) -> None:
    """Remove the environments of old builds that nothing is using."""
    builds = [path for path in folder.glob(pattern) if path.is_dir()]
    builds.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in builds[_KEPT_BUILDS:]:
        with open(path.with_name(path.name + ".lock"), "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            shutil.rmtree(path, ignore_errors=True)


def _hold(folder: Path) -> None:
    """Mark a build's environment as in use while this process or a child lives."""
    handle = os.open(folder.with_name(folder.name + ".lock"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_SH)
    os.set_inheritable(handle, True)
    os.utime(folder)


def ensure_env(project: Project, wheel: Path) -> Path:
    """Return the interpreter of a CPU environment that has a built wheel installed.

    The environment is made on first use, and reused for the same requirements, Python
    and wheel. It is kept while this process or one that it starts is running.

    Args:
        project: The checkout whose pinned requirements to use.
        wheel: A wheel from `build`, for the CPU.

    Raises:
        ToolError: If this Python is too old, or pip fails.
    """
    if sys.version_info[:2] < OLDEST_PYTHON:
        raise ToolError(
            "the CPU environment needs Python 3.11 or later, not "
            + sys.version.split()[0],
            "set PYTHON to a newer interpreter: PYTHON=python3.12 ./run ...",
        )
    lock = project.locks / "requirements-cpu.txt"
    base = requirements_env(lock, "cpu")
    prefix = f"build-{_key(lock.read_text(encoding='utf-8'))}"
    folder = base.parents[2] / f"{prefix}-{sha256_of(wheel)[:16]}"
    with _locked(folder.with_name(folder.name + ".lock")):
        if not venv_python(folder).exists():
            with step(f"installing {wheel.name}"):
                make_venv(
                    folder, lambda py: _fill_build(base, py, wheel), "--without-pip"
                )
    _hold(folder)
    _prune(folder.parent, f"{prefix}-*")
    return venv_python(folder)
