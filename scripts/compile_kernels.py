# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Compile every kernel for every target, without a GPU; see kernel_table.py."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hisparse_tools.build import build
from hisparse_tools.env import cpu_run_env, ensure_env
from hisparse_tools.errors import run_command
from hisparse_tools.paths import this_project
from hisparse_tools.pins import Device


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    project = this_project()
    built = build(project, Device.CPU)
    python = ensure_env(project, built.path)
    env = cpu_run_env()
    # With it, nothing would be compiled.
    del env["TRITON_INTERPRET"]
    script = Path(__file__).with_name("kernel_table.py")
    os.execve(python, [str(python), str(script), *argv], env)


if __name__ == "__main__":
    run_command(main)
