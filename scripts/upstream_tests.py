# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Run vLLM's own CPU-runnable tests against the built wheel."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hisparse_tools.build import cpu_python, patched
from hisparse_tools.errors import run_command
from hisparse_tools.paths import this_project
from hisparse_tools.pins import read_pins
from hisparse_tools.progress import say, step
from hisparse_tools.series import read_series
from hisparse_tools.upstream_tests import GROUPS, prepare, run_group


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    project = this_project()
    parser = argparse.ArgumentParser(prog="nox -s upstream --", description=__doc__)
    parser.add_argument(
        "groups", nargs="*", help=f"{' or '.join(GROUPS)} (default: both)"
    )
    args = parser.parse_args(argv)
    for group in args.groups:
        if group not in GROUPS:
            parser.error(f"there is no group {group}: choose from {', '.join(GROUPS)}")
    python = cpu_python(project)
    pins = read_pins(project.pins_file)
    lines = []
    failed = False
    with patched(pins, read_series(project), None) as (applied, folder):
        with step("preparing the release's own tests"):
            env = prepare(project, applied, python, folder / "files")
        for group in args.groups or list(GROUPS):
            say(f"- running group {group}")
            verdict = run_group(project, group, python, folder / "files", env)
            failed = failed or not verdict.passed
            still = verdict.wanted - len(verdict.broken) - len(verdict.lost)
            lines.append(f"{group}: {still} of {verdict.wanted} still pass")
    say("\n".join(lines))
    return 1 if failed else 0


if __name__ == "__main__":
    run_command(main)
