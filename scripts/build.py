# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Build the patched wheel into dist/."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from hisparse_tools.build import build
from hisparse_tools.device import detect
from hisparse_tools.errors import ToolError, run_command
from hisparse_tools.paths import this_project, user_path
from hisparse_tools.pins import Device
from hisparse_tools.progress import say


def _install_hint(device: Device, path: Path) -> str:
    wheel = shlex.quote(str(path))
    if device is Device.CPU:
        # Requirements first, from the lock: the CPU build of torch is chosen there.
        lock = shlex.quote(str(this_project().locks / "requirements-cpu.txt"))
        return (
            f"  python3 -m pip install -r {lock}\n"
            f"  python3 -m pip install --no-deps {wheel}"
        )
    return f"  python3 -m pip install {wheel}"


def _make_folder(path: Path) -> None:
    """Make the folder for the wheel now, rather than after the work."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolError(
            f"the folder {path} cannot be created: {error.strerror}",
            "name another with --out",
        ) from error


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="nox -s build --", description=__doc__)
    parser.add_argument(
        "--device",
        choices=[device.value for device in Device],
        help="what the wheel runs on; CUDA if this machine has it, else cpu",
    )
    parser.add_argument(
        "--machine", help="x86_64 or aarch64; this machine's by default"
    )
    parser.add_argument(
        "--sdist", type=user_path, help="source archive, instead of fetching"
    )
    parser.add_argument(
        "--wheel", type=user_path, help="published wheel, instead of fetching"
    )
    parser.add_argument(
        "--out", type=user_path, help="folder for the wheel (default: dist/)"
    )
    args = parser.parse_args(argv)
    start = time.monotonic()
    if args.out:
        _make_folder(args.out)
    device = Device(args.device) if args.device else detect()
    say(f"building vLLM with the HiSparse series for {device.value}")
    built = build(
        this_project(), device, args.machine, args.sdist, args.wheel, args.out
    )
    say()
    say(f"built   {built.path}")
    say(f"version {built.version} ({built.changed} files changed)")
    say(f"sha256  {built.sha256}")
    say(f"time    {time.monotonic() - start:.1f} s")
    say("install it in a virtual environment:")
    say(_install_hint(device, built.path))
    return 0


if __name__ == "__main__":
    run_command(main)
