# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Fetching goes through pip, and only the pinned bytes ever reach the cache."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hisparse_tools import fetch
from hisparse_tools.errors import ToolError
from hisparse_tools.pins import Pins, read_pins
from toy import Toy

pytest.importorskip("pip", reason="pip is not installed for this Python")


@pytest.fixture
def index(toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let pip see one folder, which holds the toy's files, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    for file in (toy.sdist, toy.wheel):
        (folder / file.name).write_bytes(file.read_bytes())
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def leftovers(cache: Path) -> list[str]:
    """Return every file in the cache but finished environments."""
    return [
        path.relative_to(cache).as_posix()
        for path in cache.rglob("*")
        if path.is_file() and "venvs" not in path.parts
    ]


def pins_of(toy: Toy) -> Pins:
    return read_pins(toy.project.pins_file)


def test_source_is_fetched_without_running_its_code(
    toy: Toy, index: Path, private_cache: Path
) -> None:
    pins = pins_of(toy)
    path = fetch.get_sdist(pins)
    assert path.read_bytes() == toy.sdist.read_bytes()
    assert leftovers(private_cache) == [
        f"downloads/{pins.sdist.sha256}/{toy.sdist.name}"
    ]


def test_wheel_for_any_platform_is_fetched(
    toy: Toy, index: Path, private_cache: Path
) -> None:
    pin = pins_of(toy).wheels["cpu-x86_64"]
    path = fetch.get_wheel(pins_of(toy), pin)
    assert path.read_bytes() == toy.wheel.read_bytes()
    assert leftovers(private_cache) == [
        f"downloads/{pin.artifact.sha256}/{toy.wheel.name}"
    ]


def test_second_fetch_needs_no_pip(
    toy: Toy, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetch.get_sdist(pins_of(toy))

    def fail(*args: object) -> None:
        raise AssertionError("pip was called")

    monkeypatch.setattr(fetch, "_run_pip", fail)
    assert fetch.get_sdist(pins_of(toy)) == first


def test_damaged_file_in_the_cache_is_fetched_again(toy: Toy, index: Path) -> None:
    path = fetch.get_sdist(pins_of(toy))
    path.write_bytes(b"damaged")
    assert fetch.get_sdist(pins_of(toy)).read_bytes() == toy.sdist.read_bytes()


def test_file_with_another_hash_on_the_index_is_refused(
    toy: Toy, index: Path, private_cache: Path
) -> None:
    (index / toy.wheel.name).write_bytes(toy.wheel.read_bytes() + b"\0")
    pin = pins_of(toy).wheels["cpu-x86_64"]
    with pytest.raises(ToolError, match="the package index offers another"):
        fetch.get_wheel(pins_of(toy), pin)
    assert leftovers(private_cache) == []


def test_file_that_pip_let_through_is_still_checked(
    toy: Toy, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(artifact: object, version: str, options: object, folder: Path) -> None:
        (folder / "files" / toy.sdist.name).write_bytes(b"anything")

    monkeypatch.setattr(fetch, "_run_pip", careless)
    with pytest.raises(ToolError, match="has sha256"):
        fetch.get_sdist(pins_of(toy))
    assert leftovers(private_cache) == []


def test_no_network_is_said_with_a_remedy(
    toy: Toy, index: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ToolError, match="could not be fetched with pip") as caught:
        fetch.get_sdist(pins_of(toy))
    assert "--sdist" in caught.value.remedy
    assert leftovers(private_cache) == []


def test_interpreter_without_pip_gets_one(
    toy: Toy, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ensurepip", reason="this Python cannot make environments")
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    assert fetch.get_sdist(pins_of(toy)).read_bytes() == toy.sdist.read_bytes()


def test_missing_venv_module_is_said_with_a_remedy(
    toy: Toy, index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bare = tmp_path / "python3"
    bare.write_text("#!/bin/sh\necho 'ensurepip is not available'\nexit 1\n")
    bare.chmod(0o755)
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("sys.executable", str(bare))
    with pytest.raises(ToolError, match="cannot make a virtual environment") as caught:
        fetch.get_sdist(pins_of(toy))
    assert "python3-venv" in caught.value.remedy


def test_missing_git_is_said_with_a_remedy(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolError, match="git is not installed") as caught:
        toy.build()
    assert "apt-get install git" in caught.value.remedy


def test_half_made_environment_is_never_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from hisparse_tools.venvs import make_venv, venv_python

    def fail(python: Path) -> None:
        assert python.exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_venv(tmp_path / "v" / "env", fail, "--without-pip")
    assert list((tmp_path / "v").iterdir()) == []
    make_venv(tmp_path / "v" / "env", lambda python: None, "--without-pip")
    ask = [
        str(venv_python(tmp_path / "v" / "env")),
        "-c",
        "import sys; print(sys.prefix)",
    ]
    done = subprocess.run(ask, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "v" / "env")


def test_what_pip_leaves_when_it_is_killed_goes_with_the_scratch_folder(
    toy: Toy,
    index: Path,
    private_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    killed = tmp_path / "killed-pip"
    killed.write_text('#!/bin/sh\necho part > "$TMPDIR/unpack.whl"\nkill -9 $$\n')
    killed.chmod(0o755)
    monkeypatch.setattr(fetch, "_pip_python", lambda: str(killed))
    with pytest.raises(ToolError):
        fetch.get_sdist(pins_of(toy))
    assert list(temporary.iterdir()) == []
    assert leftovers(private_cache) == []
