# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Compile every kernel for every target, without a GPU; see kernel_table.py.

`--newest` takes the Triton of ci/requirements-triton.txt in place of the one that the
release's torch asks for: a look ahead, which writes nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from hisparse_tools.build import cpu_python
from hisparse_tools.env import (
    cpu_run_env,
    requirements_env,
    site_packages,
)
from hisparse_tools.errors import ToolError, run_command
from hisparse_tools.paths import this_project

NEWEST = "--newest"


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="nox -s compile --", description=__doc__)
    parser.add_argument(NEWEST, action="store_true", help="with the newer Triton")
    parser.add_argument(
        "--write", action="store_true", help="put the table into docs/kernels.md"
    )
    # Before the build, which takes its time.
    args = parser.parse_args(argv)
    project = this_project()
    if args.newest and args.write:
        raise ToolError(
            "docs/kernels.md is about the Triton that serves, not the newest",
            f"leave out --write or {NEWEST}",
        )
    python = cpu_python(project)
    env = cpu_run_env()
    # With it, nothing would be compiled.
    del env["TRITON_INTERPRET"]
    if args.newest:
        lock = project.locks / "requirements-triton.txt"
        newest = requirements_env(lock, "triton", "--no-deps")
        env["PYTHONPATH"] = str(site_packages(newest))
    script = Path(__file__).with_name("kernel_table.py")
    options = ["--write"] if args.write else []
    os.execve(python, [str(python), str(script), *options], env)


if __name__ == "__main__":
    run_command(main)
