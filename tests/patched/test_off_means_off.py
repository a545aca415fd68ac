# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""With HiSparse not configured the scheduler does what the release does (R9).

The recording was made from the unpatched release by `scheduler_recording.py`.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from make_tiny_glm import make_tiny_glm
from scheduler_recording import record

RECORDING = Path(__file__).with_name("scheduler_recording.txt")


@pytest.fixture(scope="module")
def recorded() -> list[str]:
    return RECORDING.read_text().splitlines()


def test_recording_has_what_can_go_wrong(recorded: list[str]) -> None:
    steps = [ast.literal_eval(line) for line in recorded[:-1]]
    assert sum(len(step[5]) for step in steps) >= 3, "preemptions"
    assert sum(hit > 0 for step in steps for _, _, hit in step[2]) >= 5, "prefix hits"
    assert any(len(step[1]) >= 5 for step in steps), "requests at once"


def test_scheduler_outputs_equal_the_release(recorded: list[str], tmp_path) -> None:
    actual = record(str(make_tiny_glm(tmp_path / "model")))
    for got, want in zip(actual, recorded, strict=True):
        assert got == want


def test_no_module_of_hisparse_is_imported(tmp_path) -> None:
    code = (
        "import sys, scheduler_recording as r; r.record(sys.argv[1]);"
        "print([m for m in sys.modules if 'vllm.v1.hisparse' in m])"
    )
    folders = [str(Path(__file__).parent), *sys.path]
    result = subprocess.run(
        [sys.executable, "-c", code, str(make_tiny_glm(tmp_path / "model"))],
        env={**os.environ, "PYTHONPATH": ":".join(folders)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == "[]"
