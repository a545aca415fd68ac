# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""ruff and mypy with the settings of the pinned release, on the files we touch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .apply import Applied
from .export import changes_of
from .git import Git
from .paths import Project, cache_dir
from .progress import say

# The oldest Python of both vLLM and these tools.
PYTHON_VERSION = "3.10"
SPDX = (
    "# SPDX-License-Identifier: Apache-2.0\n# SPDX-FileCopyrightText: Copyright contrib"
)
_FOLDERS = ("scripts", "tests", "bench")
# so that imports of our own modules sort behind those of other packages
_FIRST_PARTY = "src = ['.', 'scripts', 'tests/*', 'bench']"
_NEEDED = ("vllm", "tests", "tools/pre_commit", "pyproject.toml")


@dataclass(frozen=True)
class Check:
    """One call of a tool.

    Attributes:
        title: What it looks at.
        command: Its arguments, the interpreter left out.
        folder: Where it runs.
        path: Folders for imports, for mypy.
    """

    title: str
    command: tuple[str, ...]
    folder: Path
    path: str = ""


def project_files(project: Project) -> list[Path]:
    """Return the project's own Python files, the overlay left out."""
    files = [project.root / "noxfile.py"]
    for name in _FOLDERS:
        files += (project.root / name).rglob("*.py")
    return sorted(path for path in files if path.is_file())


def without_spdx(files: Sequence[Path]) -> list[Path]:
    """Return the files that do not start with the two licence lines."""

    def bare(text: str) -> bool:
        if text.startswith("#!"):
            text = text.partition("\n")[2]
        return bool(text) and not text.startswith(SPDX)

    return [path for path in files if bare(path.read_text("utf-8"))]


def check_out(applied: Applied, folder: Path) -> list[str]:
    """Put the patched source's Python files in a folder; return those we touch."""
    folder.mkdir()
    Git(applied.git.git_dir, folder).raw("checkout", applied.head, "--", *_NEEDED)
    touched = set()
    for commit in applied.commits:
        touched |= {c.path for c in changes_of(applied.git, commit)}
    return sorted(p for p in touched if p.endswith(".py") and (folder / p).is_file())


def _project_checks(project: Project, config: Path) -> list[Check]:
    root = project.root
    names = [str(path.relative_to(root)) for path in project_files(project)]
    settings = ("--config", str(config), "--config", _FIRST_PARTY, "--no-cache")
    checks = [
        Check("ruff check, project", ("ruff", "check", *settings, *names), root),
        Check(
            "ruff format, project",
            ("ruff", "format", "--check", *settings, *names),
            root,
        ),
    ]
    return checks + _project_mypy(root, config, names)


def _project_mypy(root: Path, config: Path, names: list[str]) -> list[Check]:
    """One call per folder, since two test folders may each have a conftest."""
    checks = []
    groups: dict[str, list[str]] = {}
    for name in names:
        group = "scripts" if name == "noxfile.py" else str(Path(name).parent)
        group = "scripts" if group.startswith("scripts") else group
        groups.setdefault(group, []).append(name)
    for group, files in sorted(groups.items()):
        path = os.pathsep.join({"scripts": None, group: None})
        command = ["mypy", "--config-file", str(config), "--explicit-package-bases"]
        command += ["--python-version", PYTHON_VERSION, *_mypy_cache()]
        # as upstream does: tests are not held to the signatures of what they test
        command += ["--follow-imports", "skip"] if group.startswith("tests") else []
        checks.append(Check(f"mypy, {group}", (*command, *files), root, path))
    return checks


def _mypy_cache() -> tuple[str, str]:
    return "--cache-dir", str(cache_dir() / "mypy")


def _source_checks(folder: Path, touched: list[str]) -> list[Check]:
    if not touched:
        return []
    return [
        Check(
            "ruff check, patched source",
            ("ruff", "check", "--no-cache", *touched),
            folder,
        ),
        Check(
            "ruff format, patched source",
            ("ruff", "format", "--check", "--no-cache", *touched),
            folder,
        ),
        # upstream's own script, which knows upstream's exceptions
        Check(
            "mypy, patched source",
            ("tools/pre_commit/mypy.py", PYTHON_VERSION, *touched),
            folder,
        ),
    ]


def _run(python: Path, check: Check) -> bool:
    head = [] if check.command[0].endswith(".py") else ["-m"]
    env = {**os.environ, "MYPYPATH": check.path, "MYPY_CACHE_DIR": _mypy_cache()[1]}
    # upstream's script calls mypy by name
    env["PATH"] = f"{python.parent}{os.pathsep}{env.get('PATH', '')}"
    say(f"- {check.title}")
    command = [str(python), *head, *check.command]
    return subprocess.run(command, cwd=check.folder, env=env).returncode == 0


def run_checks(
    project: Project, python: Path, folder: Path, touched: list[str]
) -> list[str]:
    """Run every check; return the titles of those that found something.

    Args:
        project: The checkout.
        python: Interpreter of the environment that has ruff and mypy.
        folder: The patched source, as from `check_out`.
        touched: Its files that the series brings or changes.
    """
    failed = []
    overlay = sorted(project.overlay.rglob("*.py"))
    bare = without_spdx([*project_files(project), *overlay])
    for path in bare:
        say(f"{path.relative_to(project.root)}: the two SPDX lines are missing")
    if bare:
        failed.append("licence lines")
    checks = _project_checks(project, folder / "pyproject.toml")
    for check in checks + _source_checks(folder, touched):
        if not _run(python, check):
            failed.append(check.title)
    return failed
