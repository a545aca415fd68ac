# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The sessions about GPUs: which interpreter runs what, and what they say without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import compile_kernels
import gpu
from hisparse_tools.library_checks import LibraryChecks, read_library_checks

SCRIPTS = Path(gpu.__file__).parent


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
    monkeypatch.setattr(gpu, "_DEVICE_FILE", tmp_path / "nvidia0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.main([]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("skipped: no NVIDIA GPU (") and "torch" in line


@pytest.mark.parametrize("sign", ["nvidia0", "nvidia-smi"])
def test_a_gpu_that_no_interpreter_reaches_is_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sign: str
) -> None:
    old = interpreter(tmp_path, "old", "AssertionError: no CUDA device", 1)
    monkeypatch.setattr(gpu, "candidates", lambda: iter([old]))
    monkeypatch.setattr(gpu, "_DEVICE_FILE", tmp_path / "nvidia0")
    monkeypatch.setenv("PATH", str(tmp_path))
    interpreter(tmp_path, sign, "", 0)
    with pytest.raises(gpu.ToolError) as raised:
        gpu.main([])
    assert f"{tmp_path / sign} says that there is a GPU" in raised.value.what
    assert "no CUDA device" in raised.value.what
    assert "a torch built for CUDA" in raised.value.remedy


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


CHECKS = """
import pytest
from hisparse_tools.library_checks import NOT_THIS_GPU

@pytest.fixture
def kernels():
    pytest.skip("a library is not installed")

def test_one(): pass
def test_two(): pass
def test_three(): pytest.skip(f"{NOT_THIS_GPU}: it needs another")
def test_four(kernels): pass
def test_five(kernels): pass
"""


def checks_of(folder: Path, text: str) -> LibraryChecks:
    """What is read from the report of a pytest run over such checks."""
    (folder / "test_padded_blocks.py").write_text(text)
    (folder / "test_padded_pools.py").write_text("def test_pool(): pass\n")
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {SCRIPTS}\n")
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}"]
    subprocess.run(command, cwd=folder, capture_output=True, timeout=60)
    return read_library_checks(report)


def test_checks_of_libraries_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    checks = checks_of(tmp_path, CHECKS + "def test_six(): assert False\n")
    assert checks == LibraryChecks(2, 1, ("a library is not installed",) * 2)
    assert checks.text() == (
        "library checks: 2 passed, 2 skipped (a library is not installed), 1 not for "
        "this GPU"
    )


def test_without_a_report_no_library_was_checked(tmp_path: Path) -> None:
    assert read_library_checks(tmp_path / "report.xml") == LibraryChecks()


def test_all_steps_passing_says_so_when_no_library_was_checked(
    capsys: pytest.CaptureFixture,
) -> None:
    skipped = LibraryChecks(0, 1, ("a library is not installed",))
    assert gpu.conclude([], skipped, strict=False) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert "0 passed, 1 skipped (a library is not installed)" in first
    assert last == "all steps passed, but no library was checked"
    assert gpu.conclude([], LibraryChecks(1, 1), strict=False) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all steps passed"


@pytest.mark.parametrize(
    "checks", [LibraryChecks(3, 0, ("not installed",)), LibraryChecks(0, 3)]
)
def test_a_library_that_is_required_and_was_not_checked_is_an_error(
    checks: LibraryChecks,
) -> None:
    with pytest.raises(gpu.ToolError, match="--require-libraries is given") as raised:
        gpu.conclude([], checks, strict=True)
    assert "install vLLM for CUDA" in raised.value.remedy
    assert gpu.conclude([], LibraryChecks(1, 3), strict=True) == 0
    assert gpu.conclude(["bench"], checks, strict=True) == 1


@pytest.mark.parametrize("option", [["--dry-run"], ["--only", "bench"]])
def test_libraries_cannot_be_required_where_none_would_be_checked(
    option: list[str], capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        gpu.parse(["--require-libraries", *option])
    assert "--require-libraries" in capsys.readouterr().err


def test_the_report_of_the_libraries_step_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    code = (
        "import sys; open(sys.argv[1].partition('=')[2], 'w').write('<t><testcase"
        ' classname="gpu.test_padded_blocks"/></t>\')'
    )
    steps = [gpu.Step("padded", "", ("-c", code)), gpu.Step("bench", "", ("-c", ""))]
    env = dict(os.environ)
    assert gpu.run_all(sys.executable, steps, env) == ([], LibraryChecks(1))
    assert gpu.run_all(sys.executable, steps[1:], env) == ([], None)
    assert not (tmp_path / "build" / "gpu" / "tmp").exists()


def test_asserts_stay_in_the_code_under_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    for device in ("cuda", "cpu"):
        assert "PYTHONOPTIMIZE" not in gpu.environment(device)


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
    assert commands[0].endswith("test_padded_blocks.py")
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
