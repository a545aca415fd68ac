# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The sessions about GPUs: which interpreter runs what, and what they say without."""

import os
import sys
from pathlib import Path

import pytest

import compile_kernels
import gpu


def interpreter(folder: Path, name: str, text: str, status: int) -> str:
    """A stand-in for a Python that prints something and exits."""
    path = folder / name
    where = "" if status == 0 else " >&2"
    path.write_text(f"#!/bin/sh\necho '{text}'{where}\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


def test_the_first_interpreter_that_reaches_a_gpu_is_taken(tmp_path: Path) -> None:
    none = interpreter(tmp_path, "none", "ModuleNotFoundError: torch", 1)
    one = interpreter(tmp_path, "one", "H200 torch 2", 0)
    two = interpreter(tmp_path, "two", "H100 torch 2", 0)
    assert gpu.find_gpu([none, one, two]) == (one, "H200 torch 2")


def test_every_interpreter_without_a_gpu_is_named_with_its_reason(
    tmp_path: Path,
) -> None:
    none = interpreter(tmp_path, "none", "ModuleNotFoundError: torch", 1)
    old = interpreter(tmp_path, "old", "AssertionError: no CUDA device", 1)
    python, why = gpu.find_gpu([none, old])
    assert python is None
    assert f"{none}: ModuleNotFoundError: torch; {old}: AssertionError" in why


def test_an_interpreter_that_never_answers_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "slow"
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    path.chmod(0o755)
    monkeypatch.setattr(gpu, "_PROBE_S", 0.2)
    one = interpreter(tmp_path, "one", "H200 torch 2", 0)
    assert gpu.find_gpu([str(path)]) == (None, f"{path}: no answer within 0.2 s")
    monkeypatch.setattr(gpu, "_PROBE_S", 20)
    assert gpu.find_gpu([one])[0] == one


def test_without_a_gpu_one_line_says_so_and_nothing_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    none = interpreter(tmp_path, "none", "ModuleNotFoundError: torch", 1)
    monkeypatch.setattr(gpu, "candidates", lambda: iter([none]))
    assert gpu.main([]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("skipped: no NVIDIA GPU (") and "torch" in line


def test_a_step_that_fails_is_named_and_the_others_still_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    found = interpreter(tmp_path, "python", "H200", 0)
    monkeypatch.setattr(gpu, "candidates", lambda: iter([found]))
    mark = tmp_path / "ran"
    steps = [
        gpu.Step("padded", "", ("-c", "raise SystemExit(3)")),
        gpu.Step("bench", "", ("-c", f"open({str(mark)!r}, 'w')")),
    ]
    assert gpu.run_steps(sys.executable, steps, dict(os.environ)) == ["padded"]
    assert mark.exists() and "status 3" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "run_steps", lambda python, steps, env: ["padded"])
    assert gpu.main([]) == 1


def test_compiled_kernels_run_on_a_gpu_and_the_interpreter_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" not in gpu.environment("cuda")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert gpu.environment("cpu")["TRITON_INTERPRET"] == "1"


def test_pytest_that_was_brought_along_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bare = interpreter(tmp_path, "bare", "ModuleNotFoundError: pytest", 1)
    monkeypatch.setattr(gpu, "PYTEST_FOLDER", tmp_path / "pytest")
    env = {"PYTHONPATH": "/mine"}
    with pytest.raises(gpu.ToolError, match="has no pytest"):
        gpu.add_pytest(bare, env)
    (tmp_path / "pytest").mkdir()
    gpu.add_pytest(bare, env)
    assert env["PYTHONPATH"] == f"{tmp_path / 'pytest'}{os.pathsep}/mine"


def test_the_padded_blocks_come_first_and_every_folder_is_run() -> None:
    commands = [" ".join(step.command) for step in gpu.STEPS]
    assert "test_padded_blocks.py" in commands[0]
    assert "tests/kernels" in commands[1] and "tests/gpu" in commands[2]
    for part in " ".join(commands).split():
        path = part.removeprefix("--ignore=")
        assert "/" not in path or (gpu.ROOT / path).exists(), path


def test_the_table_in_the_docs_is_not_written_from_another_triton() -> None:
    with pytest.raises(gpu.ToolError, match="not the newest"):
        compile_kernels.main(["--write", "--newest"])


def test_an_interpreter_that_cannot_run_is_a_reason(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/nonexistent/python\n")
    broken.chmod(0o755)
    python, about = gpu.find_gpu([str(broken)])
    assert python is None and str(broken) in about
