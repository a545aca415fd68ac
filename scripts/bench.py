# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Run a benchmark of bench/ in the CPU environment; on a GPU see scripts/gpu.py."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hisparse_tools.build import cpu_python
from hisparse_tools.env import cpu_run_env
from hisparse_tools.errors import ToolError, run_command
from hisparse_tools.paths import this_project

_BENCHMARKS = {
    "scheduler_cost": "scheduler_cost.py",
    "policy": os.path.join("policy", "study.py"),
    "kernels": "kernels.py",
}


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    names = ", ".join(_BENCHMARKS)
    if not argv or argv[0] not in _BENCHMARKS:
        given = argv[0] if argv else "none"
        raise ToolError(
            f"the benchmark is {given}; allowed: {names}",
            "./run bench -- scheduler_cost --help",
        )
    project = this_project()
    python = cpu_python(project)
    script = project.root / "bench" / _BENCHMARKS[argv[0]]
    os.execve(python, [str(python), str(script), *argv[1:]], cpu_run_env())


if __name__ == "__main__":
    run_command(main)
