# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The maintainer's tree: a git repository with one commit per patch."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from .apply import SERIES_REF, Applied, apply_series
from .errors import ToolError
from .export import export_series
from .git import Git, init_repository
from .paths import scratch
from .sdist import BASE_REF, Base
from .series import Series

_STATE = "hisparse.json"
_UNFINISHED = ("rebase-merge", "rebase-apply", "MERGE_HEAD", "CHERRY_PICK_HEAD")


@dataclass(frozen=True)
class State:
    """What a tree held when it last agreed with the project.

    Attributes:
        base: Commit of the unpatched source.
        head: Commit of the last patch.
        digest: Hash of the project's series at that moment.
    """

    base: str
    head: str
    digest: str


def open_tree(folder: Path) -> tuple[Git, State]:
    """Open a tree made by ``nox -s source``.

    Raises:
        ToolError: If there is none. A folder without a repository of its own is
            never searched upwards: git would act on whatever surrounds it.
    """
    git_dir = folder / ".git"
    if not folder.is_dir():
        raise ToolError(f"there is no folder {folder}", "run: nox -s source")
    if not git_dir.is_dir():
        raise ToolError(
            f"{folder} is no git repository of its own; inside another repository git "
            "would act on that one",
            "make a tree with: nox -s source -- DIR",
        )
    try:
        state = State(**json.loads((git_dir / _STATE).read_text()))
    except (OSError, ValueError, TypeError):
        raise ToolError(
            f"{folder} is a git repository, but not one made by 'nox -s source'",
            "make a tree with: nox -s source -- DIR",
        ) from None
    return Git(git_dir, folder), state


def write_state(git: Git, state: State) -> None:
    """Record that tree and project agree."""
    temporary = git.git_dir / f"{_STATE}.new"
    temporary.write_text(json.dumps(asdict(state), indent=1) + "\n")
    os.replace(temporary, git.git_dir / _STATE)


def unsaved(git: Git) -> list[str]:
    """Return what is not in a commit: changed and new files, an unfinished rebase."""
    found = [
        f"an unfinished {name}" for name in _UNFINISHED if (git.git_dir / name).exists()
    ]
    listing = git.raw(
        "status", "--porcelain", "-z", "-uall", "--ignored", "--no-renames"
    )
    for line in listing.decode("utf-8", "replace").split("\0")[:-1]:
        status, path = line[:2], line[3:]
        # Ignored files are leftovers of tools, unless they could be sources that one
        # of upstream's ignore rules hides.
        if status == "!!" and not (path.startswith("vllm/") and path.endswith(".py")):
            continue
        found.append(path)
    return found


def work_in(git: Git, state: State) -> list[str]:
    """Return the work in a tree that the project does not have."""
    work = unsaved(git)
    head = git.text("rev-parse", "HEAD")
    if head != state.head:
        work.append(f"commits up to {head[:12]} that were not exported")
    refs = git.text("for-each-ref", "--format=%(objectname) %(refname)").splitlines()
    known = set(git.text("rev-list", state.head).split()) | {head}
    for line in refs:
        commit, _, name = line.partition(" ")
        if commit not in known:
            work.append(name)
    return work


def check_target(folder: Path, force: bool) -> None:
    """Check before any long work that a tree may be made in a folder.

    Raises:
        ToolError: If the folder is something else, or has work in it.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    git, state = open_tree(folder)
    work = work_in(git, state)
    if work and not force:
        shown = ", ".join(work[:3]) + (", ..." if len(work) > 3 else "")
        raise ToolError(
            f"{folder} has work in it: {shown}",
            "export it with 'nox -s refresh' (commit first), choose another folder "
            "(nox -s source -- DIR), or throw the work away with --force",
        )


def _checkout(applied: Applied, folder: Path, digest: str) -> None:
    """Turn the scratch repository's objects into a repository with files."""
    git = init_repository(folder / ".git", folder)
    shutil.rmtree(git.git_dir / "objects")
    shutil.copytree(applied.git.git_dir / "objects", git.git_dir / "objects")
    git.raw("update-ref", BASE_REF, applied.base.commit)
    git.raw("update-ref", SERIES_REF, applied.head)
    git.raw("symbolic-ref", "HEAD", SERIES_REF)
    git.raw("config", "core.autocrlf", "false")
    git.raw("config", "core.excludesFile", "/dev/null")
    git.raw("reset", "--hard", "--quiet")
    write_state(git, State(applied.base.commit, applied.head, digest))


def make_tree(applied: Applied, series: Series, folder: Path, force: bool) -> None:
    """Make or replace a maintainer's tree.

    Args:
        applied: The patched source.
        series: The series that was applied.
        folder: Where the tree is to be.
        force: Replace a tree even if there is work in it.

    Raises:
        ToolError: If the folder is something else, or has work in it.
    """
    check_target(folder, force)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch(folder.parent / ".staging") as staging:
        made = staging / "tree"
        _checkout(applied, made, series.digest())
        if folder.exists():
            os.replace(folder, staging / "old")
        try:
            os.replace(made, folder)
        except BaseException:
            if (staging / "old").exists():
                os.replace(staging / "old", folder)
            raise


def export_tree(folder: Path, base_tree: str, work: Path) -> tuple[Series, str, State]:
    """Export a tree's commits, and prove that they come back exactly.

    Args:
        folder: The maintainer's tree.
        base_tree: Tree id of the unpatched source.
        work: A scratch folder.

    Returns:
        The series, the tree id of the patched source, and the state to record once
        the series is written to the project.

    Raises:
        ToolError: If the tree is dirty or a commit cannot be carried.
    """
    tree_git, state = open_tree(folder)
    dirty = unsaved(tree_git)
    if dirty:
        shown = ", ".join(dirty[:3]) + (", ..." if len(dirty) > 3 else "")
        raise ToolError(
            f"{folder} has changes that are in no commit: {shown}",
            "commit them (git add -f for files that upstream ignores), or undo them",
        )
    # A repository of our own that only borrows the objects: the tree's configuration
    # has no say, and nothing is written to it.
    git = init_repository(work / "export.git")
    git.extra_env["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = str(
        tree_git.git_dir.resolve() / "objects"
    )
    head = tree_git.text("rev-parse", "HEAD")
    if git.text("rev-parse", f"{state.base}^{{tree}}") != base_tree:
        raise ToolError(
            f"{folder} was made from another release than upstream.toml pins",
            "make a new tree with: nox -s source -- DIR",
        )
    if git.call("merge-base", "--is-ancestor", state.base, head).returncode:
        raise ToolError(
            f"HEAD of {folder} does not descend from its 'upstream' commit",
            "switch back to the series: git switch series",
        )
    series = export_series(git, state.base, head)
    applied = apply_series(git, Base(state.base, base_tree, {}), series, work)
    tree = git.text("rev-parse", f"{head}^{{tree}}")
    if applied.tree != tree:
        raise ToolError(
            f"the exported series gives tree {applied.tree}, not HEAD's {tree}",
            "please report this: the commits use something the export cannot hold",
        )
    return series, tree, State(state.base, head, series.digest())
