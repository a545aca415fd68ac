# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Make a maintainer's tree: one commit per patch, overlay files included."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hisparse_tools.apply import check_tree
from hisparse_tools.build import patched
from hisparse_tools.errors import run_command
from hisparse_tools.paths import this_project, user_path
from hisparse_tools.pins import read_pins
from hisparse_tools.progress import say, step
from hisparse_tools.series import read_series
from hisparse_tools.tree import check_target, make_tree


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    project = this_project()
    parser = argparse.ArgumentParser(prog="nox -s source --", description=__doc__)
    parser.add_argument(
        "folder",
        nargs="?",
        type=user_path,
        default=project.source,
        help="where the tree goes (default: build/source)",
    )
    parser.add_argument("--force", action="store_true", help="throw away work in it")
    parser.add_argument(
        "--sdist", type=user_path, help="source archive, instead of fetching"
    )
    args = parser.parse_args(argv)
    folder = args.folder.resolve()
    pins = read_pins(project.pins_file)
    series = read_series(project)
    check_target(folder, args.force)
    with patched(pins, series, args.sdist) as (applied, _):
        check_tree(applied, pins.tree)
        with step(f"checking out {folder}"):
            make_tree(applied, series, folder, args.force)
    say(f"{folder}: branch 'series', {len(series.patches)} commits on 'upstream'")
    say("edit and commit there, then run: nox -s refresh")
    return 0


if __name__ == "__main__":
    run_command(main)
