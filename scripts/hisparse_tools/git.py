# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The one way git is run here: hermetic, and on a named repository only.

Nothing of the user's or the machine's configuration, and no surrounding repository,
can change a result: git is always told its repository, never left to find one. (Left
to itself inside a subdirectory of another repository, ``git apply`` skips every file
and reports success.)
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .errors import ToolError

IDENTITY = ("Hybrid HiSparse maintainers", "maintainers@hybrid-hisparse.invalid")
EPOCH = "1767225600 +0000"

_CONFIG = (
    "core.autocrlf=false",
    "core.attributesFile=/dev/null",
    "core.excludesFile=/dev/null",
    "core.hooksPath=/dev/null",
    "core.fsync=none",
    "commit.gpgSign=false",
    "gc.auto=0",
    "i18n.commitEncoding=UTF-8",
    "i18n.logOutputEncoding=UTF-8",
    # The folder may belong to another user, as in a container; it is named, not found.
    "safe.directory=*",
)

# Highest precedence: a .gitattributes file in the tree must not convert or hide text.
_ATTRIBUTES = "* !text !eol -filter -ident !diff !merge -working-tree-encoding\n"


def require_git() -> None:
    """Check that git is there.

    Raises:
        ToolError: If it is not.
    """
    if shutil.which("git") is None:
        raise ToolError(
            "git is not installed, or not on PATH",
            "install it (Debian, Ubuntu: apt-get install git)",
        )


def clean_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which git reads no configuration but ours."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env.update(
        GIT_CONFIG_GLOBAL="/dev/null",
        GIT_CONFIG_NOSYSTEM="1",
        GIT_ATTR_NOSYSTEM="1",
        GIT_TERMINAL_PROMPT="0",
        LC_ALL="C",
        TZ="UTC",
        GIT_AUTHOR_NAME=IDENTITY[0],
        GIT_AUTHOR_EMAIL=IDENTITY[1],
        GIT_AUTHOR_DATE=EPOCH,
        GIT_COMMITTER_NAME=IDENTITY[0],
        GIT_COMMITTER_EMAIL=IDENTITY[1],
        GIT_COMMITTER_DATE=EPOCH,
    )
    env.pop("LANGUAGE", None)
    env.update(extra or {})
    return env


class GitFailed(Exception):
    """git ended with an error; its message is the text."""


@dataclass
class Git:
    """A repository, named explicitly.

    Attributes:
        git_dir: The repository itself.
        work_tree: Its files, or None for a bare repository.
        extra_env: Further environment variables, such as alternate object folders.
    """

    git_dir: Path
    work_tree: Path | None = None
    extra_env: dict[str, str] = field(default_factory=dict)

    def env(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment for one call."""
        fixed = {
            "GIT_DIR": str(self.git_dir),
            "GIT_CEILING_DIRECTORIES": str(self.git_dir.parent),
        }
        if self.work_tree is not None:
            fixed["GIT_WORK_TREE"] = str(self.work_tree)
        return clean_env({**fixed, **self.extra_env, **(extra or {})})

    def command(self, args: Sequence[str]) -> list[str]:
        """Return the full command line for ``git args``."""
        head = ["git"]
        for setting in _CONFIG:
            head += ["-c", setting]
        return head + list(args)

    def call(
        self,
        *args: str,
        data: bytes | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run git and return its status and output."""
        require_git()
        # Paths in patches are relative to the top: so is the folder git runs in.
        return subprocess.run(
            self.command(args),
            input=b"" if data is None else data,
            capture_output=True,
            env=self.env(env),
            cwd=self.work_tree or self.git_dir,
        )

    def raw(
        self,
        *args: str,
        data: bytes | None = None,
        env: Mapping[str, str] | None = None,
    ) -> bytes:
        """Run git and return what it printed.

        Raises:
            GitFailed: If it ended with an error.
        """
        done = self.call(*args, data=data, env=env)
        if done.returncode:
            message = done.stderr.decode("utf-8", "replace").strip()
            raise GitFailed(message or f"git {args[0]} ended with {done.returncode}")
        return done.stdout

    def text(self, *args: str, data: bytes | None = None) -> str:
        """Run git and return what it printed, decoded and stripped."""
        return self.raw(*args, data=data).decode("utf-8").strip()


def init_repository(git_dir: Path, work_tree: Path | None = None) -> Git:
    """Make an empty repository that no template or attribute file can influence.

    Args:
        git_dir: Where the repository goes.
        work_tree: Where its files go; None makes a bare repository.
    """
    require_git()
    git_dir.parent.mkdir(parents=True, exist_ok=True)
    command = ["git", "-c", "init.defaultBranch=series", "init", "-q", "--template="]
    command += ["--bare", str(git_dir)] if work_tree is None else [str(work_tree)]
    subprocess.run(command, check=True, env=clean_env(), stdout=subprocess.DEVNULL)
    info = git_dir / "info"
    info.mkdir(exist_ok=True)
    (info / "attributes").write_text(_ATTRIBUTES)
    return Git(git_dir, work_tree)
