# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The benchmark of the scheduler runs, and says what it compares."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "scheduler_cost.py"
sys.path.append(str(BENCH.parent))

import scheduler_cost  # noqa: E402


def test_quick_run_prints_a_row_for_each_variant_and_its_progress() -> None:
    command = [sys.executable, str(BENCH), "--quick"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "off: vLLM " in run.stdout and "HiSparse not configured" in run.stdout
    lines = [line.strip("| ") for line in run.stdout.splitlines() if "|" in line]
    rows = [dict(zip(lines[0].split(" | "), i.split(" | "))) for i in lines[2:]]
    assert [row["variant"] for row in rows] == ["off", "resident", "mixed"]
    assert [int(row["bookkeeping MiB"]) > 0 for row in rows] == [False, True, True]
    assert [int(row["mixed"]) > 0 for row in rows] == [False, False, True]
    assert all(float(row["quiet µs"]) > 0 for row in rows)
    begun = "  16 requests of 34,500 tokens, 1 of 54: starting off"
    assert begun in run.stderr.splitlines()


def refusal(capsys: pytest.CaptureFixture, *args: str) -> str:
    with pytest.raises(SystemExit):
        scheduler_cost.parse(args)
    return " ".join(capsys.readouterr().err.split())


def test_folder_without_the_unpatched_release_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    said = refusal(capsys, "--unpatched", str(tmp_path))
    assert f"argument --unpatched: {tmp_path} has no vllm; give the folder" in said


def test_folder_with_a_patched_release_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "vllm/v1/hisparse").mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").touch()
    said = refusal(capsys, "--unpatched", str(tmp_path))
    assert (
        f"the vllm in {tmp_path} has HiSparse; give the folder of one without" in said
    )


def test_folder_of_the_unpatched_release_is_relative_to_where_run_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site/vllm").mkdir(parents=True)
    (tmp_path / "site/vllm/__init__.py").touch()
    monkeypatch.setenv("HISPARSE_CALLED_FROM", str(tmp_path))
    args = scheduler_cost.parse(["--unpatched", f"site{os.pathsep}libraries"])
    folders = [tmp_path / "site", tmp_path / "libraries"]
    assert args.unpatched == os.pathsep.join(map(str, folders))


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--requests", "0", "1 to 16,384"),
        ("--tokens", "63", "64 to 1,000,000"),
        ("--rounds", "0", "1 or more"),
    ],
)
def test_number_out_of_range_is_said_with_the_range(
    option: str, value: str, allowed: str, capsys: pytest.CaptureFixture
) -> None:
    said = refusal(capsys, option, value)
    assert f"argument {option}: it is {value}; give {allowed}" in said


def test_quick_run_takes_the_numbers_that_it_is_given() -> None:
    args = scheduler_cost.parse(["--quick", "--requests", "2", "3", "--rounds", "4"])
    assert (args.requests, args.tokens, args.rounds) == ([2, 3], [34_500], 4)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (["1", "34500"], "error: in 'mixed': HiSparse: "),
        (["64", "1000"], "error: in 'mixed' the device holds 0.25 times what all"),
    ],
)
def test_numbers_that_cannot_all_run_are_said_with_a_remedy(
    numbers: list[str], said: str
) -> None:
    world = BENCH.with_name("scheduler_world.py")
    command = [sys.executable, str(world), "mixed", *numbers, "64"]
    run = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 1
    error, remedy = run.stderr.splitlines()[-2:]
    assert error.startswith(said) and "--requests or --tokens" in remedy
