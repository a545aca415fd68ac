# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Every kernel compiles for every target, within its limits (D24)."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="needs Triton")

import kernel_table  # noqa: E402
from kernel_table import Compiled, problems  # noqa: E402

PROJECT = Path(__file__).resolve().parents[2]
COPIES = "ld.global.v4.b32 st.global.v4.b32 ld.global.b32"


def found(name: str, kernel: str = "_lookup_kernel", **changes: object) -> list[str]:
    launch = SimpleNamespace(kernel=SimpleNamespace(__name__=kernel))
    fields = {"registers": 32, "spilled": 0, "shared": 0, "assembly": COPIES}
    return list(problems(launch, name, Compiled(**(fields | changes))))


def test_spills_are_a_problem_beyond_what_a_target_may() -> None:
    assert not found("sm_90") and not found("sm_100", spilled=64)
    assert found("sm_90", spilled=8) == ["it spills 8 bytes, allowed are 0"]
    assert found("gfx942", spilled=68) == ["it spills 68 bytes, allowed are 64"]


@pytest.mark.parametrize("kernel", ["_fetch_kernel", "_copy_pages_kernel"])
def test_copies_use_16_bytes_and_see_what_others_wrote(kernel: str) -> None:
    assert not found("sm_90", kernel)
    (narrow,) = found("sm_90", kernel, assembly=COPIES.replace("ld.global.v4", "x"))
    assert narrow == "no 16-byte load among ld.global.b32"
    (narrow,) = found("sm_100", kernel, assembly=COPIES.replace("st.global.v4", "x"))
    assert narrow.startswith("no 16-byte store")
    (stale,) = found("sm_90", kernel, assembly=COPIES + " ld.global.nc.b32")
    assert "(.nc)" in stale
    assert not found("sm_90", assembly="ld.global.b32")


def test_the_table_in_the_docs_is_what_the_kernels_compile_to() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, kernel_table.__file__]
    ran = subprocess.run(command, capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    rows = [line for line in ran.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) > 40
    text = (PROJECT / "docs" / "kernels.md").read_text()
    written = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows == written, "write it anew: ./run compile -- --write"
