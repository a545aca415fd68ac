# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Applying the series to the unpatched source: exactly, or not at all.

Patches are applied to the index of a bare repository, so there is no work tree in
which something could be missed, and no surrounding repository to be confused with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .errors import ToolError
from .export import changes_of, check_change, export_commit
from .git import Git, GitFailed
from .progress import Bar
from .sdist import Base
from .series import Patch, Series

SERIES_REF = "refs/heads/series"


@dataclass(frozen=True)
class Applied:
    """The patched source in a repository.

    Attributes:
        git: The repository.
        base: The unpatched source.
        commits: One commit per patch, in order.
        tree: Tree id of the patched source.
    """

    git: Git
    base: Base
    commits: tuple[str, ...]
    tree: str

    @property
    def head(self) -> str:
        """The last commit."""
        return self.commits[-1] if self.commits else self.base.commit


@dataclass(frozen=True)
class _Mail:
    author: dict[str, str]
    message: bytes
    diff: Path


def _open_mail(git: Git, patch: Patch, folder: Path) -> _Mail:
    message, diff = folder / "message", folder / "diff"
    args = ("mailinfo", "-k", "--no-scissors", "--encoding=UTF-8")
    try:
        info = git.raw(*args, str(message), str(diff), data=patch.content)
    except GitFailed as error:
        raise ToolError(
            f"patches/{patch.name} is no patch mail: {error}",
            "let 'nox -s refresh' write the patches; never edit them by hand",
        ) from error
    fields = dict(
        line.split(": ", 1)
        for line in info.decode("utf-8").splitlines()
        if ": " in line
    )
    missing = [
        key for key in ("Author", "Email", "Subject", "Date") if key not in fields
    ]
    if missing:
        raise ToolError(
            f"patches/{patch.name} has no {missing[0].lower()} in its head",
            "let 'nox -s refresh' write the patches; never edit them by hand",
        )
    author = {
        "GIT_AUTHOR_NAME": fields["Author"],
        "GIT_AUTHOR_EMAIL": fields["Email"],
        "GIT_AUTHOR_DATE": fields["Date"],
        # Commit ids then depend on the series only, not on when it is applied.
        "GIT_COMMITTER_DATE": fields["Date"],
    }
    text = f"{fields['Subject']}\n\n".encode() + message.read_bytes()
    return _Mail(author, text, diff)


def _apply_diff(git: Git, patch: Patch, diff: Path) -> None:
    args = ("apply", "--cached", "-v", "-p1", "--whitespace=nowarn")
    done = git.call(*args, str(diff))
    report = done.stderr.decode("utf-8", "replace")
    if done.returncode:
        errors = re.findall(r"(?m)^error: (.*)$", report) or [report.strip()]
        raise ToolError(
            f"patches/{patch.name} does not apply: {'; '.join(errors)}",
            "the source or an earlier patch has changed under it: redo its commit in "
            "a maintainer's tree ('nox -s source') and run 'nox -s refresh'",
        )
    moved = re.search(r"(?m)^Hunk #(\d+) succeeded at (\d+) (.*)$", report)
    if moved:
        raise ToolError(
            f"patches/{patch.name} applies only elsewhere: hunk {moved[1]} at line "
            f"{moved[2]} {moved[3].rstrip('.')}",
            "check that the hunk still belongs there, redo its commit in a "
            "maintainer's tree ('nox -s source') and run 'nox -s refresh'",
        )


def _existing(git: Git) -> set[str]:
    return set(git.raw("ls-files", "-z").decode("utf-8").split("\0")[:-1])


def _lay_overlay(git: Git, patch: Patch, series: Series) -> None:
    paths = patch.message.overlay
    if not paths:
        return
    existing = _existing(git)
    folders = {"/".join(p.split("/")[:i]) for p in existing for i in range(1, 9)}
    lines = []
    for path in paths:
        parents = {"/".join(path.split("/")[:i]) for i in range(1, path.count("/") + 1)}
        hit = ({path} if path in existing or path in folders else set()) | (
            parents & existing
        )
        if hit:
            raise ToolError(
                f"overlay file {path.removeprefix('vllm/')} of patches/{patch.name} "
                f"would replace {sorted(hit)[0]}, which exists upstream",
                "give the overlay file another name; change existing files by a patch",
            )
        blob = git.text("hash-object", "-w", "--stdin", data=series.overlay[path])
        lines.append(f"100644 {blob}\t{path}\n")
    git.raw("update-index", "--add", "--index-info", data="".join(lines).encode())


def _check_reach(git: Git, commit: str, patch: Patch) -> None:
    """Check that the wheel can carry the commit, and that bodies are in the overlay."""
    for change in changes_of(git, commit):
        check_change(change, patch.message.subject)
        new = change.status == "A" and change.path.startswith("vllm/")
        if new and change.path not in patch.message.overlay:
            raise ToolError(
                f"patches/{patch.name} adds {change.path}, which belongs in the "
                "overlay",
                "redo its commit in a maintainer's tree ('nox -s source') and run "
                "'nox -s refresh', which puts new files there",
            )


def _commit(git: Git, mail: _Mail, parent: str) -> str:
    tree = git.text("write-tree")
    done = git.raw(
        "commit-tree", tree, "-p", parent, data=mail.message, env=mail.author
    )
    return done.decode().strip()


def apply_series(git: Git, base: Base, series: Series, folder: Path) -> Applied:
    """Apply every patch, lay its overlay files, and prove the result.

    After each patch its commit is exported again; the export must be the patch file,
    byte for byte. So a hunk that landed elsewhere, a mangled message or a silently
    skipped file cannot pass.

    Args:
        git: The bare repository that holds ``base``.
        base: The unpatched source.
        series: What to apply.
        folder: A scratch folder.

    Raises:
        ToolError: If a patch does not apply exactly, or an overlay file exists.
    """
    git.raw("read-tree", base.commit)
    parent = base.commit
    commits: list[str] = []
    with Bar("applying", len(series.patches)) as bar:
        for patch in series.patches:
            mail = _open_mail(git, patch, folder)
            _apply_diff(git, patch, mail.diff)
            _lay_overlay(git, patch, series)
            commit = _commit(git, mail, parent)
            _check_reach(git, commit, patch)
            again = export_commit(git, commit, patch.message.overlay)
            if again != patch.content:
                raise ToolError(
                    f"patches/{patch.name} is not what its commit exports to: "
                    f"{_first_difference(patch.content, again)}",
                    "never edit a patch by hand: redo its commit in a maintainer's "
                    "tree ('nox -s source') and run 'nox -s refresh'",
                )
            parent = commit
            commits.append(commit)
            bar.advance(1)
    git.raw("update-ref", SERIES_REF, parent)
    tree = git.text("rev-parse", f"{parent}^{{tree}}")
    return Applied(git, base, tuple(commits), tree)


def _first_difference(old: bytes, new: bytes) -> str:
    ours, theirs = old.splitlines(), new.splitlines()
    for number, (a, b) in enumerate(zip(ours, theirs), start=1):
        if a != b:
            return f"line {number} is {a.decode('utf-8', 'replace')!r}, not " + repr(
                b.decode("utf-8", "replace")
            )
    return f"it has {len(ours)} lines, not {len(theirs)}"


def check_base(base: Base, expected: str, archive: str) -> None:
    """Check the tree id of the unpatched source.

    Raises:
        ToolError: If it is not the pinned one.
    """
    if base.tree != expected:
        raise ToolError(
            f"{archive} has tree {base.tree}, but upstream.toml pins {expected} "
            "for the unpatched source",
            "use the archive that upstream.toml pins, or correct [sdist] there",
        )


def check_tree(applied: Applied, expected: str) -> None:
    """Check the tree id of the patched source.

    Raises:
        ToolError: If it is not the pinned one.
    """
    if applied.tree != expected:
        raise ToolError(
            f"the patched source has tree {applied.tree}, but upstream.toml pins "
            f"{expected}",
            "if you changed vllm_overlay/ on purpose, run 'nox -s refresh -- "
            "--in-place'; otherwise restore patches/ and vllm_overlay/",
        )
