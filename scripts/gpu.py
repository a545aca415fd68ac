# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Run on one NVIDIA GPU what only a GPU can show, then the kernels' benchmark.

Needs plain torch and triton, no wheel and no vLLM; where vLLM's libraries are there,
their kernels are checked first. The interpreter that runs it is the first of this one,
`python3` and `python` that imports torch and triton and finds a CUDA device. Without
a GPU there is a line that says so, and nothing is wrong; a GPU that no interpreter
reaches is an error.

pytest is taken from that interpreter, else from build/gpu/pytest, which `--prepare`
fills on a machine with a network.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hisparse_tools.build import cpu_python
from hisparse_tools.env import cpu_run_env
from hisparse_tools.errors import ToolError, run_command
from hisparse_tools.library_checks import LibraryChecks, read_library_checks
from hisparse_tools.paths import scratch, this_project
from hisparse_tools.progress import say

PROJECT = this_project()
ROOT = PROJECT.root
PYTEST_FOLDER = ROOT / "build" / "gpu" / "pytest"
_PROBE = """
import torch, triton
assert torch.cuda.is_available(), "torch finds no CUDA device"
assert torch.version.cuda, "torch is not built for CUDA"
print(torch.cuda.get_device_name(), "torch", torch.__version__, end=" ")
print("triton", triton.__version__)
"""
_PROBE_S = 120
_DEVICE_FILE = Path("/dev/nvidia0")
# Of all steps together: just below ten minutes.
_LIMIT_S = 570


@dataclass(frozen=True)
class Step:
    """Something to run.

    Attributes:
        name: For `--only`.
        why: What it shows.
        command: Arguments of the interpreter.
    """

    name: str
    why: str
    command: tuple[str, ...]


def _pytest(*args: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", *args)


_FIRST = tuple(
    os.path.join("tests", "gpu", name)
    for name in ("test_padded_pools.py", "test_padded_blocks.py")
)
_LIBRARIES = "padded"
STEPS = (
    Step(_LIBRARIES, "attention and logits over padded blocks", _pytest(*_FIRST)),
    Step("kernels", "every kernel against its reference", _pytest("tests/kernels")),
    Step(
        "graphs",
        "graphs, streams, host memory in place, long streams",
        _pytest("tests/gpu", *(f"--ignore={path}" for path in _FIRST)),
    ),
    Step(
        "bench", "the benchmark of the kernels", (os.path.join("bench", "kernels.py"),)
    ),
)


def candidates() -> Iterator[str]:
    """Interpreters that may have torch, each once."""
    seen = set()
    for path in (sys.executable, shutil.which("python3"), shutil.which("python")):
        # Not the real path: environments share their interpreter.
        if path and os.path.abspath(path) not in seen:
            seen.add(os.path.abspath(path))
            yield path


def find_gpu(pythons: Sequence[str]) -> tuple[str | None, str]:
    """The first interpreter that reaches a GPU, with what it said.

    Returns:
        Its path and GPU; or None, and why each of them does not.
    """
    reasons = []
    for python in pythons:
        try:
            found = subprocess.run(
                [python, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_S
            )
        except subprocess.TimeoutExpired:
            reasons.append(f"{python}: no answer within {_PROBE_S} s")
            continue
        except OSError as error:
            reasons.append(f"{python}: {error}")
            continue
        if found.returncode == 0:
            return python, found.stdout.strip()
        lines = found.stderr.strip().splitlines() or [f"status {found.returncode}"]
        reasons.append(f"{python}: {lines[-1]}")
    return None, "; ".join(reasons)


def sign_of_a_gpu() -> str | None:
    """What says that this machine has an NVIDIA GPU, whatever torch finds."""
    if _DEVICE_FILE.exists():
        return str(_DEVICE_FILE)
    return shutil.which("nvidia-smi")


def chosen_python() -> tuple[str, str] | None:
    """The interpreter to take and its GPU; None, and a line, where there is no GPU.

    Raises:
        ToolError: There is a GPU, and no interpreter reaches it.
    """
    python, about = find_gpu([*candidates()])
    if python is not None:
        return python, about
    sign = sign_of_a_gpu()
    if sign is None:
        say(f"skipped: no NVIDIA GPU ({about})")
        return None
    raise ToolError(
        f"{sign} says that there is a GPU, and no Python reaches it: {about}",
        "run this with a Python that has triton and a torch built for CUDA; if it has "
        "them, see that nvidia-smi lists the GPU, that its driver is as new as torch's "
        "CUDA asks for, and that CUDA_VISIBLE_DEVICES does not hide it",
    )


def environment(device: str) -> dict[str, str]:
    """The environment of the steps."""
    env = cpu_run_env() if device == "cpu" else {**os.environ}
    if device != "cpu":
        env.pop("TRITON_INTERPRET", None)
    # It would take the asserts out of the code under test.
    env.pop("PYTHONOPTIMIZE", None)
    return {**env, "HISPARSE_TEST_DEVICE": device}


def add_pytest(python: str, env: dict[str, str]) -> None:
    """Let an interpreter find pytest.

    Raises:
        ToolError: There is none.
    """
    command = [python, "-c", "import pytest"]
    if subprocess.run(command, env=env, capture_output=True).returncode == 0:
        return
    if not PYTEST_FOLDER.is_dir():
        raise ToolError(
            f"{python} has no pytest, and {PYTEST_FOLDER} is not there",
            "with a network: scripts/gpu.py --prepare; then bring that folder along",
        )
    folders = [str(PYTEST_FOLDER), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, folders))


def prepare() -> None:
    """Put pytest into a folder that can be brought along."""
    shutil.rmtree(PYTEST_FOLDER, ignore_errors=True)
    requirements = ROOT / "ci" / "requirements-gpu.txt"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    command += ["--no-compile", "--target", str(PYTEST_FOLDER), "-r", str(requirements)]
    if subprocess.run(command).returncode:
        raise ToolError("pip could not fetch pytest", "check the network (pip config)")
    say(f"pytest is in {PYTEST_FOLDER}")


def run_steps(python: str, steps: Sequence[Step], env: dict[str, str]) -> list[str]:
    """Run steps within the time there is; the names of those that failed."""
    stop, failed = time.monotonic() + _LIMIT_S, []
    for step in steps:
        say(f"- {step.name}: {step.why}")
        start = time.monotonic()
        try:
            status = subprocess.run(
                [python, *step.command], cwd=ROOT, env=env, timeout=max(1, stop - start)
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
            say(f"  stopped: all steps together have {_LIMIT_S} s")
        say(f"  {time.monotonic() - start:.0f} s, status {status}")
        if status:
            failed.append(step.name)
    return failed


def run_all(
    python: str, steps: Sequence[Step], env: dict[str, str]
) -> tuple[list[str], LibraryChecks | None]:
    """Run steps; the names of those that failed, and what was checked of libraries.

    The latter is None where that step is not among them.
    """
    with scratch(ROOT / "build" / "gpu" / "tmp") as folder:
        report = folder / "libraries.xml"
        steps = [
            replace(step, command=(*step.command, f"--junitxml={report}"))
            if step.name == _LIBRARIES
            else step
            for step in steps
        ]
        failed = run_steps(python, steps, env)
        is_asked = any(step.name == _LIBRARIES for step in steps)
        return failed, read_library_checks(report) if is_asked else None


def conclude(failed: Sequence[str], checks: LibraryChecks | None, strict: bool) -> int:
    """Say how it went; the exit status.

    Args:
        failed: Names of steps.
        checks: What was checked of libraries, if anything was to be.
        strict: Whether a check that a library's absence prevents is a failure.

    Raises:
        ToolError: With `strict`, a check was skipped or none passed.
    """
    if checks is not None:
        say(checks.text())
    if failed:
        say(f"failed: {', '.join(failed)}")
        return 1
    if checks is not None and strict and not checks.is_complete:
        raise ToolError(
            "--require-libraries is given, and libraries were not checked (see above)",
            "install vLLM for CUDA, of the release that upstream.toml names, in the "
            "Python named above; or leave out --require-libraries",
        )
    if checks is not None and not checks.passed:
        say("all steps passed, but no library was checked")
    else:
        say("all steps passed")
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="nox -s gpu --", description=__doc__)
    names = [step.name for step in STEPS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--require-libraries",
        action="store_true",
        help="fail if a check was skipped because an attention library is not there",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run all of it on the CPU, in Triton's interpreter, at tiny sizes; makes "
        "the CPU environment",
    )
    parser.add_argument(
        "--prepare", action="store_true", help="fetch pytest into build/gpu, and stop"
    )
    args = parser.parse_args(argv)
    if args.require_libraries and args.dry_run:
        parser.error("--require-libraries is for a GPU: a dry run has stand-ins only")
    if args.require_libraries and _LIBRARIES not in args.only:
        parser.error(f"--require-libraries needs {_LIBRARIES} among --only")
    return args


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(argv)
    if args.prepare:
        prepare()
        return 0
    steps = [step for step in STEPS if step.name in args.only]
    if args.dry_run:
        python = str(cpu_python(PROJECT))
        about = "a dry run on the CPU, which shows nothing of a GPU or a library"
        options = ("--device", "cpu", "--dry-run")
        steps = [
            replace(step, command=(*step.command, *options))
            if step.name == "bench"
            else step
            for step in steps
        ]
    else:
        found = chosen_python()
        if found is None:
            return 0
        python, about = found
    say(f"{python}: {about}")
    env = environment("cpu" if args.dry_run else "cuda")
    add_pytest(python, env)
    failed, checks = run_all(python, steps, env)
    # A dry run checks stand-ins.
    return conclude(failed, None if args.dry_run else checks, args.require_libraries)


if __name__ == "__main__":
    run_command(main)
