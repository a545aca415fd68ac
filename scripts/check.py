# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Check every patch's message, size, order and reach, and that the series applies."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hisparse_tools.apply import check_tree
from hisparse_tools.build import patched
from hisparse_tools.check import check_series
from hisparse_tools.errors import ToolError, run_command
from hisparse_tools.paths import Project, this_project, user_path
from hisparse_tools.pins import read_pins
from hisparse_tools.progress import say
from hisparse_tools.readme import with_table
from hisparse_tools.series import Series, read_series


def _check_readme(project: Project, series: Series) -> None:
    text = project.readme.read_text(encoding="utf-8")
    if with_table(text, series) != text:
        raise ToolError(
            "README.md's patch table is not that of the patches",
            "run: nox -s refresh -- --in-place",
        )


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    project = this_project()
    parser = argparse.ArgumentParser(prog="nox -s check --", description=__doc__)
    parser.add_argument(
        "--no-apply", action="store_true", help="read the patches only; fetch nothing"
    )
    parser.add_argument(
        "--sdist", type=user_path, help="source archive, instead of fetching"
    )
    args = parser.parse_args(argv)
    pins = read_pins(project.pins_file)
    series = read_series(project)
    problems = check_series(series, project.root)
    for problem in problems:
        say(str(problem))
    if problems:
        raise ToolError(
            f"{len(problems)} rules are broken in {len({p.patch for p in problems})} "
            "patches (listed above)",
            "mend the commits in a maintainer's tree and run 'nox -s refresh'",
        )
    _check_readme(project, series)
    if not args.no_apply:
        with patched(pins, series, args.sdist) as (applied, _):
            check_tree(applied, pins.tree)
    say(f"{len(series.patches)} patches and {len(series.overlay)} overlay files: fine")
    return 0


if __name__ == "__main__":
    run_command(main)
