# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The benchmark of the scheduler runs, and says what it compares."""

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "scheduler_cost.py"


def test_quick_run_prints_a_row_for_each_variant() -> None:
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
