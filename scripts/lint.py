# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Run ruff and mypy as vLLM configures them, on the files of this project."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hisparse_tools.build import patched
from hisparse_tools.env import requirements_env
from hisparse_tools.errors import ToolError, run_command
from hisparse_tools.lint import check_out, run_checks
from hisparse_tools.paths import this_project, user_path
from hisparse_tools.pins import read_pins
from hisparse_tools.progress import say, step
from hisparse_tools.series import read_series


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    project = this_project()
    parser = argparse.ArgumentParser(prog="nox -s lint --", description=__doc__)
    parser.add_argument(
        "--sdist", type=user_path, help="source archive, instead of fetching"
    )
    args = parser.parse_args(argv)
    pins = read_pins(project.pins_file)
    python = requirements_env(project.locks / "requirements-lint.txt", "lint")
    with patched(pins, read_series(project), args.sdist) as (applied, folder):
        with step("checking out the patched source"):
            touched = check_out(applied, folder / "files")
        failed = run_checks(project, python, folder / "files", touched)
    if failed:
        raise ToolError(
            f"found something: {', '.join(failed)}",
            "mend what is listed above (ruff format and ruff check --fix do much)",
        )
    say("lint: fine")
    return 0


if __name__ == "__main__":
    run_command(main)
