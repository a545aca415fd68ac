# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The CPU environment: settings, and which builds stay installed."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from hisparse_tools import env
from hisparse_tools.errors import ToolError
from hisparse_tools.paths import Project

ROOT = Path(__file__).resolve().parents[2]


def test_run_settings_are_in_force_and_user_paths_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HISPARSE_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    settings = env.cpu_run_env()
    assert settings["OMP_NUM_THREADS"] == "1"
    assert settings["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert settings["TRITON_INTERPRET"] == "1"
    assert settings["HF_HUB_OFFLINE"] == "1"
    assert "PYTHONPATH" not in settings


def test_old_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "OLDEST_PYTHON", (9, 0))
    with pytest.raises(ToolError, match="needs Python 3.11 or later"):
        env.ensure_env(Project(ROOT), ROOT / "no.whl")


def test_old_builds_go_but_not_those_in_use(tmp_path: Path) -> None:
    for age in range(6):
        folder = tmp_path / f"build-x-{age}"
        folder.mkdir()
        os.utime(folder, (1000 - age, 1000 - age))
    with open(tmp_path / "build-x-4.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        env._prune(tmp_path, "build-x-*")
    left = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert left == ["build-x-0", "build-x-1", "build-x-2", "build-x-4"]


def test_locks_pin_every_package() -> None:
    for lock in sorted((ROOT / "ci").glob("requirements-*.txt")):
        for line in lock.read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                assert line.split(";")[0].count("==") == 1, (lock.name, line)


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_cpu_lock_has_no_package_that_breaks_beside_a_cpu_torch(name: str) -> None:
    text = (ROOT / "ci" / "requirements-cpu.txt").read_text(encoding="utf-8")
    assert f"\n{name}==" not in text
