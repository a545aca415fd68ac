# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Breaking the code on purpose, to see that a test fails: never in the working tree."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from .env import cpu_run_env, site_packages
from .errors import ToolError
from .paths import Project
from .pins import load_toml

_COPIED = ("bench", "ci", "docs", "patches", "scripts", "tests", "vllm_overlay")
_COPIED_FILES = (
    "README.md",
    "noxfile.py",
    "pytest.ini",
    "run",
    "upstream.toml",
    ".gitignore",
)
_TIMEOUT_S = 900
_PYTEST_FAILED = 1


class Fate(Enum):
    """What a test made of a mutation."""

    KILLED = "killed"
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN"


@dataclass(frozen=True)
class Mutant:
    """One way to break the code.

    Attributes:
        file: The file, in the project (``scripts/...``, ``run``) or in the patched
            vLLM (``vllm/...``).
        old: Text that is there exactly once.
        new: Text to put in its place.
        tests: Node ids, at least one of which must then fail.
        why: The care that is taken out.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str

    @property
    def in_vllm(self) -> bool:
        """Whether the file is one of the patched vLLM."""
        return self.file.startswith("vllm/")


def read_mutants(path: Path) -> list[Mutant]:
    """Read ``mutants.toml``.

    Raises:
        ToolError: If an entry lacks a field.
    """
    mutants = []
    for entry in load_toml(path.read_text(encoding="utf-8")).get("mutant", []):
        try:
            tests = entry["test"]
            tests = (tests,) if isinstance(tests, str) else tuple(tests)
            mutants.append(
                Mutant(entry["file"], entry["old"], entry["new"], tests, entry["why"])
            )
        except KeyError as error:
            raise ToolError(
                f"an entry of {path.name} has no {error}: {entry}",
                "give file, old, new, test and why",
            ) from error
    return mutants


def chosen(mutants: list[Mutant], words: Sequence[str]) -> list[Mutant]:
    """Those whose file or reason has one of the words; all of them without words.

    Raises:
        ToolError: If a word is in none.
    """

    def has(mutant: Mutant, word: str) -> bool:
        return word in f"{mutant.file} {mutant.why}"

    unknown = [w for w in words if not any(has(mutant, w) for mutant in mutants)]
    if unknown:
        raise ToolError(
            f"no mutant has {' or '.join(map(repr, unknown))} in its file or reason",
            "look into tests/mutants.toml; case matters, and a reason of several words "
            "goes in quotes",
        )
    return [m for m in mutants if not words or any(has(m, word) for word in words)]


def copy_project(project: Project, folder: Path) -> None:
    """Copy what the tests need into a folder."""
    folder.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", ".staging")
    for name in _COPIED:
        shutil.copytree(project.root / name, folder / name, ignore=ignored)
    for name in _COPIED_FILES:
        if (project.root / name).exists():
            shutil.copy2(project.root / name, folder / name)


def mirror_package(installed: Path, folder: Path, file: str) -> Path:
    """Make a package folder that is the installed one but for one file.

    Everything else is a link, so that it takes no time and no space.

    Args:
        installed: The ``site-packages`` that has the package.
        folder: An empty folder, to be put in front on ``PYTHONPATH``.
        file: Path of the file under both.

    Returns:
        The file's copy.
    """
    folder.mkdir()
    here = Path()
    for part in Path(file).parts[:-1]:
        here /= part
        (folder / here).mkdir()
        for entry in (installed / here).iterdir():
            if entry.name != "__pycache__":
                (folder / here / entry.name).symlink_to(entry)
        following = Path(file).relative_to(here).parts[0]
        (folder / here / following).unlink()
    shutil.copy2(installed / file, folder / file)
    return folder / file


def mutated(text: str, mutant: Mutant) -> str:
    """Return the text with the mutation in it.

    Raises:
        ToolError: If the old text is not there exactly once.
    """
    count = text.count(mutant.old)
    if count != 1:
        raise ToolError(
            f"mutant of {mutant.file} ({mutant.why}): its old text is there {count} "
            "times, not once",
            "bring tests/mutants.toml up to date",
        )
    return text.replace(mutant.old, mutant.new)


@dataclass(frozen=True)
class Bench:
    """A copy of the project with an interpreter to test it.

    Attributes:
        folder: The copy.
        python: Interpreter with pytest and the built wheel.
        work: A scratch folder.
    """

    folder: Path
    python: Path
    work: Path

    def pytest(self, tests: tuple[str, ...], site: Path | None = None) -> int:
        """Run tests in the copy; return pytest's exit status."""
        env = cpu_run_env()
        # A mutation and its restoration may have one time stamp: no stale bytecode.
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        # That a test fails is enough; the shortest way to it is of no use.
        env["HISPARSE_NO_SHRINKING"] = "1"
        if site is not None:
            env["PYTHONPATH"] = str(site)
        command = [str(self.python), "-m", "pytest", "-q", "-x", "--no-header"]
        with open(self.work / "pytest.log", "w") as log:
            done = subprocess.run(
                [*command, *tests],
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT_S,
            )
        return done.returncode

    def log_tail(self, lines: int = 15) -> str:
        """Return the end of the last pytest run."""
        text = (self.work / "pytest.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def try_mutant(self, mutant: Mutant) -> Fate:
        """Apply one mutation, run its tests, and put everything back."""
        site = None
        if mutant.in_vllm:
            site = self.work / "site"
            path = mirror_package(site_packages(self.python), site, mutant.file)
        else:
            path = self.folder / mutant.file
        before = path.read_text(encoding="utf-8")
        path.write_text(mutated(before, mutant), encoding="utf-8")
        try:
            status = self.pytest(mutant.tests, site)
        finally:
            path.write_text(before, encoding="utf-8")
            if site is not None:
                shutil.rmtree(site)
        # A crash of the interpreter (a negative status) is a failure, too.
        if status == _PYTEST_FAILED or status < 0:
            return Fate.KILLED
        return Fate.SURVIVED if status == os.EX_OK else Fate.BROKEN
