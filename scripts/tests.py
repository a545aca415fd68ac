# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Build for the CPU, then run the default test set; arguments go to pytest."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from hisparse_tools.build import build
from hisparse_tools.env import cpu_run_env, ensure_env
from hisparse_tools.errors import run_command
from hisparse_tools.paths import this_project
from hisparse_tools.pins import Device
from hisparse_tools.progress import say


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    project = this_project()
    built = build(project, Device.CPU)
    python = ensure_env(project, built.path)
    say(f"testing {built.version} (sha256 {built.sha256})")
    env = cpu_run_env()
    env["HISPARSE_WHEEL"] = str(built.path)
    env["HISPARSE_NOX_PYTHON"] = sys.executable
    os.chdir(project.root)
    # A job in the background of a shell has it ignored. Processes that tests start
    # would inherit that, and tests of an interrupt would wait for nothing.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # In place of this process: signals reach pytest, and its last line is the last.
    os.execve(python, [str(python), "-m", "pytest", *argv], env)


if __name__ == "__main__":
    run_command(main)
