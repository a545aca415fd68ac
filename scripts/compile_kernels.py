# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Compile every kernel for every target, without a GPU; see kernel_table.py.

`--newest` takes the Triton of ci/requirements-triton.txt in place of the one that the
release's torch asks for: a look ahead, which writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hisparse_tools.build import cpu_python
from hisparse_tools.compile_options import parse
from hisparse_tools.env import cpu_run_env, requirements_env, site_packages
from hisparse_tools.errors import run_command
from hisparse_tools.paths import this_project


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    # Before the build, which takes its time.
    args = parse(argv, __doc__)
    project = this_project()
    python = cpu_python(project)
    env = cpu_run_env()
    # With it, nothing would be compiled.
    del env["TRITON_INTERPRET"]
    if args.newest:
        lock = project.locks / "requirements-triton.txt"
        newest = requirements_env(lock, "triton", "--no-deps")
        env["PYTHONPATH"] = str(site_packages(newest))
    script = Path(__file__).with_name("kernel_table.py")
    os.execve(python, [str(python), str(script), *argv], env)


if __name__ == "__main__":
    run_command(main)
