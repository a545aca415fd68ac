# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Bringing a maintainer's commits, or edits in place, back into the project."""

from __future__ import annotations

from pathlib import Path

from .atomic import replace_files
from .build import patched
from .errors import ToolError
from .paths import Project, scratch
from .pins import read_pins, with_tree
from .readme import with_table
from .series import Series, read_series
from .tree import export_tree, open_tree, write_state


def _generated(project: Project, series: Series, tree: str) -> dict[str, bytes | None]:
    """Return the project's files that follow from the series, by name."""
    files: dict[str, bytes | None] = {}
    pins_text = project.pins_file.read_text(encoding="utf-8")
    files[project.pins_file.name] = with_tree(pins_text, tree).encode()
    if project.readme.exists():
        readme = with_table(project.readme.read_text(encoding="utf-8"), series)
        files[project.readme.name] = readme.encode()
    return files


def refresh_from_tree(
    project: Project, folder: Path, force: bool = False
) -> tuple[Series, list[str]]:
    """Export a maintainer's tree into the project: everything, or nothing.

    Args:
        project: The checkout to update.
        folder: The maintainer's tree.
        force: Overwrite a series that changed since the tree was made.

    Returns:
        The series, and the names of the files that changed.

    Raises:
        ToolError: If the tree cannot be exported as it is.
    """
    pins = read_pins(project.pins_file)
    git, state = open_tree(folder)
    with scratch() as work:
        series, tree, new_state = export_tree(folder, pins.base_tree, work)
    now = read_series(project)
    if now.digest() not in (state.digest, series.digest()) and not force:
        raise ToolError(
            f"patches/ or vllm_overlay/ changed since {folder} was made from them, and "
            "this would undo that",
            "make a second tree (nox -s source -- DIR) and move your commits there "
            "with git cherry-pick; or overwrite with --force",
        )
    files: dict[str, bytes | None] = {name: None for name in now.files()}
    files.update(series.files())
    files.update(_generated(project, series, tree))
    changed = replace_files(project.root, files)
    write_state(git, new_state)
    return series, changed


def refresh_in_place(
    project: Project, sdist: Path | None = None
) -> tuple[Series, list[str]]:
    """Record overlay files that were edited in the project itself.

    The patches must still apply exactly; only the tree id in ``upstream.toml`` and
    README's table are written.

    Args:
        project: The checkout to update.
        sdist: Source archive to use instead of fetching it.

    Returns:
        The series, and the names of the files that changed.
    """
    pins = read_pins(project.pins_file)
    series = read_series(project)
    with patched(pins, series, sdist) as (applied, _):
        tree = applied.tree
    return series, replace_files(project.root, _generated(project, series, tree))
