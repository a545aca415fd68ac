# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The commands as a user calls them: ``./run`` and the scripts behind the sessions."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hisparse_tools.errors import ToolError, run_command
from hisparse_tools.paths import Project
from hisparse_tools.pins import read_pins
from hisparse_tools.readme import with_table
from hisparse_tools.series import read_series
from toy import Toy

ROOT = Path(__file__).resolve().parents[2]


def script(
    toy: Toy, name: str, *args: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run one of the real commands in the toy project."""
    target = toy.project.root / "scripts"
    if not target.exists():
        shutil.copytree(ROOT / "scripts", target)
    command = [sys.executable, "-B", str(target / name), *args]
    both = {**os.environ, **env}
    return subprocess.run(command, env=both, capture_output=True, text=True)


def commit_all(root: Path) -> None:
    """Put the toy project under version control, caches ignored."""
    (root / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for args in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(root), *args], check=True)


def test_every_session_leaves_the_status_clean(series_toy: Toy) -> None:
    root = series_toy.project.root
    shutil.copytree(ROOT / "scripts", root / "scripts")
    commit_all(root)
    sdist = ["--sdist", str(series_toy.sdist)]
    wheel = ["--wheel", str(series_toy.wheel), "--device", "cpu", "--machine", "x86_64"]
    for name, args in [
        ("build.py", [*sdist, *wheel]),
        ("source.py", [*sdist, "--force"]),
        ("refresh.py", []),
        ("refresh.py", [*sdist, "--in-place"]),
        ("check.py", sdist),
    ]:
        done = script(series_toy, name, *args)
        assert done.returncode == 0, (name, done.stdout, done.stderr)
        status = ["git", "-C", str(root), "status", "--porcelain"]
        assert subprocess.run(status, capture_output=True).stdout == b"", name


def test_check_passes_a_good_series(series_toy: Toy) -> None:
    done = script(series_toy, "check.py", "--sdist", str(series_toy.sdist))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("2 patches and 2 overlay files: fine\n")


def test_check_lists_broken_rules(series_toy: Toy) -> None:
    series_toy.replace_in_patch("0310", "Seam: none fits.", "Seem: none fits.")
    done = script(series_toy, "check.py", "--no-apply")
    assert done.returncode == 1
    assert "no 'Seam:' section" in done.stdout
    assert "error: 1 rules are broken in 1 patches" in done.stderr


def test_check_finds_a_patch_table_that_is_not_current(series_toy: Toy) -> None:
    readme = series_toy.project.readme
    readme.write_text(readme.read_text().replace("| never |", "| soon |"))
    done = script(series_toy, "check.py", "--no-apply")
    assert done.returncode == 1
    assert "patch table is not that of the patches" in done.stderr


def test_check_finds_a_tree_that_is_not_the_pinned_one(series_toy: Toy) -> None:
    (series_toy.project.overlay / "v1/hisparse/pages.py").write_bytes(b"")
    done = script(series_toy, "check.py", "--sdist", str(series_toy.sdist))
    assert done.returncode == 1
    assert "the patched source has tree" in done.stderr


@pytest.mark.parametrize("name", ["source.py", "refresh.py", "check.py"])
def test_unknown_flag_is_refused(series_toy: Toy, name: str) -> None:
    done = script(series_toy, name, "--nonsense")
    assert done.returncode == 2
    assert "usage: nox -s" in done.stderr


def test_this_project_is_consistent() -> None:
    project = Project(ROOT)
    series = read_series(project)
    read_pins(project.pins_file)
    text = project.readme.read_text(encoding="utf-8")
    assert with_table(text, series) == text, "run: nox -s refresh -- --in-place"


def test_paths_are_named_from_the_callers_folder(series_toy: Toy) -> None:
    folder, name = series_toy.sdist.parent, series_toy.sdist.name
    done = script(
        series_toy, "check.py", "--sdist", name, HISPARSE_CALLED_FROM=str(folder)
    )
    assert done.returncode == 0, done.stderr


def test_a_folder_for_the_wheel_that_cannot_be_made_is_refused(toy: Toy) -> None:
    done = script(toy, "build.py", "--out", str(toy.sdist))
    assert done.returncode == 1
    assert f"error: the folder {toy.sdist} cannot be created: " in done.stderr
    assert "importing" not in done.stdout


def fails_with(error: OSError) -> Callable[[Sequence[str]], int]:
    def main(argv: Sequence[str]) -> int:
        raise error

    return main


def test_what_is_wrong_comes_after_a_log_that_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """So that nobody has to scroll."""

    def main(argv: Sequence[str]) -> int:
        raise ToolError("it broke", "mend it", before="its log\n")

    with pytest.raises(SystemExit):
        run_command(main, [])
    assert capsys.readouterr().err == "its log\nerror: it broke\nremedy: mend it\n"


def test_a_folder_that_cannot_be_written_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = PermissionError(errno.EACCES, "Permission denied", "dist/.staging")
    with pytest.raises(SystemExit) as exit:
        run_command(fails_with(error), [])
    assert exit.value.code == 1
    assert "error: dist/.staging: Permission denied\n" in capsys.readouterr().err


def test_a_file_that_the_code_expects_is_not_the_users_fault() -> None:
    with pytest.raises(FileNotFoundError):
        run_command(fails_with(FileNotFoundError(errno.ENOENT, "x", "y")), [])


# ./run


def tools_folder(tmp_path: Path, *names: str) -> Path:
    """Return a PATH folder with a few system tools only."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "dirname", "mkdir", "rm", "mv", "id", *names):
        found = shutil.which(name)
        assert found is not None, name
        (folder / name).symlink_to(found)
    return folder


def bootstrap(
    path: Path,
    tmp_path: Path,
    cache: str = "c",
    run: Path = ROOT / "run",
    args: Sequence[str] = ("tests",),
) -> subprocess.CompletedProcess[str]:
    """Call ``./run tests`` from another folder, with only the tools in a folder."""
    env = {"PATH": str(path)}
    if cache:
        env |= {"HOME": str(tmp_path), "HISPARSE_CACHE": cache}
    command = [str(run), *args]
    return subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True
    )


def fake(folder: Path, name: str, body: str) -> None:
    """Write a small shell script that stands for a tool."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_run_without_git_says_so(tmp_path: Path) -> None:
    path = tools_folder(tmp_path)
    fake(path, "python3", "exit 0")
    done = bootstrap(path, tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: git is not installed")
    assert "apt-get install git" in done.stderr


def test_run_without_python_says_so(tmp_path: Path) -> None:
    done = bootstrap(tools_folder(tmp_path, "git"), tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: python3 is not installed")


def test_run_without_venv_says_so(tmp_path: Path) -> None:
    path = tools_folder(tmp_path, "git")
    fake(path, "python3", 'case "$*" in *ensurepip*) exit 1;; *) exit 0;; esac')
    done = bootstrap(path, tmp_path)
    assert done.returncode == 1
    assert "cannot make virtual environments" in done.stderr
    assert "python3-venv" in done.stderr


def test_run_with_an_old_python_says_so(tmp_path: Path) -> None:
    path = tools_folder(tmp_path, "git")
    fake(path, "python3", 'case "$*" in *version_info*) exit 1;; *) exit 0;; esac')
    done = bootstrap(path, tmp_path)
    assert done.returncode == 1
    assert "is older than Python 3.10" in done.stderr


def test_run_without_home_or_cache_says_so(tmp_path: Path) -> None:
    path = tools_folder(tmp_path, "git")
    fake(path, "python3", "exit 0")
    done = bootstrap(path, tmp_path, cache="")
    assert done.returncode == 1
    assert done.stderr.startswith("error: there is no place for a cache")


def test_run_refuses_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    path = tools_folder(tmp_path, "git")
    fake(path, "python3", "exit 0")
    done = bootstrap(path, tmp_path, cache="/proc/none")
    assert done.returncode == 1
    assert "/proc/none cannot be created or written" in done.stderr


@pytest.mark.parametrize(
    ("args", "remedy"),
    [
        (["demo", "--turns", "2"], "write ./run demo -- --turns 2;"),
        (["lint", "demo", "-k"], "write ./run lint demo -- -k;"),
        (["--help"], "write ./run SESSION -- --help;"),
    ],
)
def test_run_says_where_options_go(
    tmp_path: Path, args: list[str], remedy: str
) -> None:
    done = bootstrap(tools_folder(tmp_path), tmp_path, args=args)
    assert done.returncode == 1
    option = next(arg for arg in args if arg.startswith("-"))
    assert done.stderr.startswith(f"error: {option} is not behind two dashes\n")
    assert remedy in done.stderr


def test_run_passes_options_behind_two_dashes_on(tmp_path: Path) -> None:
    done = bootstrap(tools_folder(tmp_path), tmp_path, args=["demo", "--", "--turns"])
    assert "two dashes" not in done.stderr
    assert "git is not installed" in done.stderr


def without_network(tmp_path: Path) -> Path:
    """Return a folder of tools whose pip fails."""
    path = tools_folder(tmp_path, "git", "cp", "readlink")
    body = f"""\
case "$*" in
*"-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit 0;;
*"-m pip"*) echo "no route to host" >&2; exit 1;;
esac
exec {sys.executable} "$@"
"""
    fake(path, "python3", body)
    return path


def test_run_without_network_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    # The cache is named from the caller's folder.
    done = bootstrap(without_network(tmp_path), tmp_path, cache="c")
    assert done.returncode == 1
    assert "error: nox could not be installed with pip" in done.stderr
    assert list((tmp_path / "c" / "venvs").iterdir()) == []


def test_run_through_a_link_finds_its_project(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(ROOT / "run")
    done = bootstrap(without_network(tmp_path), tmp_path, run=link)
    assert "error: nox could not be installed with pip" in done.stderr


def test_sessions_are_listed_with_a_line_each() -> None:
    python = os.environ.get("HISPARSE_NOX_PYTHON", sys.executable)
    command = [python, "-m", "nox", "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if "No module named nox" in done.stderr:
        pytest.skip("nox is not installed for this Python; ./run tests brings it")
    assert done.returncode == 0, done.stderr
    for name in ("build", "demo", "tests", "lint", "source", "refresh", "check"):
        assert f"\n- {name} -> " in done.stdout
