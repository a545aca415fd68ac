# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Turning commits of a maintainer's tree into patches and overlay files."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ToolError
from .git import Git
from .message import (
    Message,
    next_free_id,
    parse_message,
    patch_name,
    with_overlay,
)
from .series import Patch, Series

# Every option whose default could come from a configuration or change with a version.
_FORMAT = (
    "format-patch",
    "-1",
    "--stdout",
    "-k",
    "--zero-commit",
    "--no-signature",
    "--full-index",
    "--no-renames",
    "--no-stat",
    "--no-base",
    "--no-notes",
    "--no-attach",
    "--no-thread",
    "--no-cover-letter",
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--no-relative",
    "--binary",
    "--diff-algorithm=histogram",
    "--indent-heuristic",
    "--inter-hunk-context=0",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "-U3",
)
_CARRIED = ("vllm/", "tests/")
_WRITTEN_BY_BUILD = "vllm/_version.py"


@dataclass(frozen=True)
class Change:
    """One file that a commit changes."""

    old_mode: str
    new_mode: str
    new_blob: str
    status: str
    path: str


def export_commit(git: Git, commit: str, overlay: list[str]) -> bytes:
    """Return a commit as a patch mail, leaving out its overlay files.

    The bytes depend on the commit's content only: not on its id, on any configuration
    or on time.
    """
    paths = ["."] + [f":(top,exclude,literal){path}" for path in overlay]
    return git.raw(*_FORMAT, commit, "--", *paths)


def changes_of(git: Git, commit: str) -> list[Change]:
    """Return the files that a commit changes against its parent."""
    listing = git.raw(
        "diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-commit-id", commit
    )
    fields = listing.decode("utf-8").split("\0")[:-1]
    changes = []
    for head, path in zip(fields[::2], fields[1::2]):
        old_mode, new_mode, _, new_blob, status = head.lstrip(":").split(" ")
        changes.append(Change(old_mode, new_mode, new_blob, status, path))
    return changes


def check_change(change: Change, subject: str) -> None:
    """Check that a wheel repacked from the published one can carry a change.

    Args:
        change: What a commit does to one file.
        subject: The commit's subject.

    Raises:
        ToolError: If it cannot.
    """
    path = change.path
    if not path.startswith(_CARRIED):
        raise ToolError(
            f"commit '{subject}' changes {path}, which a repacked wheel cannot carry",
            "keep to vllm/ (and tests/): a repack takes native code, build files and "
            "requirements from the published wheel",
        )
    if path.endswith(".pyc") or "__pycache__" in path:
        raise ToolError(
            f"commit '{subject}' holds {path}, which Python made",
            "take it out: git rm -r --cached, then git commit --amend",
        )
    if path == _WRITTEN_BY_BUILD:
        raise ToolError(
            f"commit '{subject}' changes {path}, which every build writes itself",
            "leave that file as it is upstream",
        )
    for mode in {change.old_mode, change.new_mode} - {"000000"}:
        if mode not in ("100644", "100755"):
            raise ToolError(
                f"commit '{subject}' makes or changes {path} as a link or submodule, "
                "which a wheel cannot carry",
                "use a plain file",
            )
    if change.status == "A":
        same = change.new_mode == "100644"
    elif change.status == "D":
        same = True
    else:
        same = change.old_mode == change.new_mode
    if not same:
        raise ToolError(
            f"commit '{subject}' sets the mode of {path} to {change.new_mode}",
            "leave file modes as they are: chmod 644 for a new file",
        )


def _fold_advice(path: str, owner: str) -> str:
    return (
        f"fold the change into the commit that brings the file: git commit --fixup "
        f"{owner[:12]} -- {path} && git rebase -i --autosquash upstream"
    )


def _message_of(git: Git, commit: str) -> Message:
    return parse_message(git.raw("log", "-1", "--format=%B", commit).decode("utf-8"))


def _check_message(message: Message, taken: set[str]) -> None:
    subject = message.subject
    if subject.startswith(("fixup!", "squash!", "amend!")):
        raise ToolError(
            f"commit '{subject}' is not folded in yet",
            "run: git rebase -i --autosquash upstream",
        )
    number = message.value("Patch")
    if number is None or not (len(number) == 4 and number.isdigit()):
        free = next_free_id(message.area, taken)
        hint = f"'Patch: {free}' is free" if free else "ids are listed in README.md"
        raise ToolError(
            f"commit '{subject}' has no 'Patch: NNNN' trailer",
            f"add one with git commit --amend (or git rebase -i): {hint}",
        )
    if number in taken:
        raise ToolError(
            f"commit '{subject}' uses patch id {number}, which an earlier commit has",
            f"give it its own id: '{next_free_id(message.area, taken)}' is free",
        )


def _rewrite(git: Git, commit: str, message: Message) -> str:
    """Return a commit like ``commit`` with another message, and the same parent."""
    form = "%P%n%an%n%ae%n%ad"
    lines = git.text("log", "-1", "--date=raw", f"--format={form}", commit).split("\n")
    parent, name, mail, date = lines
    env = {
        "GIT_AUTHOR_NAME": name,
        "GIT_AUTHOR_EMAIL": mail,
        "GIT_AUTHOR_DATE": date,
        "GIT_COMMITTER_DATE": date,
    }
    tree = git.text("rev-parse", f"{commit}^{{tree}}")
    data = message.text().encode()
    new = git.raw("commit-tree", tree, "-p", parent, data=data, env=env)
    return new.decode().strip()


def export_series(git: Git, base: str, head: str) -> Series:
    """Export the commits from ``base`` to ``head`` as a series.

    Files that a commit adds under ``vllm/`` become overlay files, and its
    ``Overlay:`` trailers are brought up to date. Nothing is written outside ``git``.

    Args:
        git: A bare scratch repository that can read the commits.
        base: Commit of the unpatched source.
        head: The last commit.

    Raises:
        ToolError: If a commit is something the series cannot hold.
    """
    commits = git.text("rev-list", "--reverse", f"{base}..{head}").split()
    owner: dict[str, str] = {}
    overlay: dict[str, bytes] = {}
    taken: set[str] = set()
    patches: list[Patch] = []
    parent = base
    for commit in commits:
        message = _message_of(git, commit)
        if git.text("log", "-1", "--format=%P", commit) != parent:
            raise ToolError(
                f"commit '{message.subject}' is a merge or does not follow the one "
                "before it",
                "keep one line of commits: git rebase -i upstream",
            )
        _check_message(message, taken)
        taken.add(message.value("Patch") or "")
        added = _sort_changes(git, commit, message, owner, overlay)
        message = with_overlay(message, added)
        content = export_commit(git, _rewrite(git, commit, message), added)
        patches.append(Patch(patch_name(message), content, message))
        parent = commit
    return Series(tuple(patches), overlay)


def _sort_changes(
    git: Git,
    commit: str,
    message: Message,
    owner: dict[str, str],
    overlay: dict[str, bytes],
) -> list[str]:
    """Check a commit's changes; record and return the overlay files it brings."""
    added = []
    changes = changes_of(git, commit)
    for change in changes:
        check_change(change, message.subject)
        if change.path in owner:
            raise ToolError(
                f"commit '{message.subject}' changes {change.path}, which an earlier "
                "commit brings in as an overlay file",
                _fold_advice(change.path, owner[change.path]),
            )
        if change.status == "A" and change.path.startswith("vllm/"):
            owner[change.path] = commit
            overlay[change.path] = git.raw("cat-file", "blob", change.new_blob)
            added.append(change.path)
    if len(added) == len(changes):
        nothing = "nothing" if not changes else "only overlay files"
        raise ToolError(
            f"commit '{message.subject}' changes {nothing}, so no patch can hold it",
            "fold it into the commit that first uses the files: "
            "git rebase -i upstream, and 'fixup'",
        )
    return added
