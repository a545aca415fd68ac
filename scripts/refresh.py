# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Export a maintainer's tree to patches/, vllm_overlay/ and upstream.toml."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hisparse_tools.check import check_series
from hisparse_tools.errors import run_command
from hisparse_tools.paths import this_project, user_path
from hisparse_tools.progress import say
from hisparse_tools.refresh import refresh_from_tree, refresh_in_place


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    project = this_project()
    parser = argparse.ArgumentParser(prog="nox -s refresh --", description=__doc__)
    parser.add_argument(
        "folder",
        nargs="?",
        type=user_path,
        default=project.source,
        help="the tree to export (default: build/source)",
    )
    parser.add_argument(
        "--in-place",
        action="store_true",
        help="no tree: record files that were edited in vllm_overlay/ itself",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="overwrite patches that changed since the tree was made",
    )
    parser.add_argument(
        "--sdist", type=user_path, help="source archive, instead of fetching"
    )
    args = parser.parse_args(argv)
    if args.in_place:
        series, changed = refresh_in_place(project, args.sdist)
    else:
        series, changed = refresh_from_tree(project, args.folder.resolve(), args.force)
    for name in changed:
        say(f"changed {name}")
    say(
        f"{len(series.patches)} patches, {len(series.overlay)} overlay files, "
        f"{len(changed)} files changed here"
    )
    problems = check_series(series, project.root)
    for problem in problems:
        say(f"still to mend: {problem}")
    return 0


if __name__ == "__main__":
    run_command(main)
