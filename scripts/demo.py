# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Build, make a small model, serve it without and with HiSparse, and compare."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hisparse_tools.build import build
from hisparse_tools.cuda_env import cuda_run_env, ensure_cuda_env
from hisparse_tools.demo_settings import free_port, parse_settings
from hisparse_tools.device import detect
from hisparse_tools.env import cpu_run_env, ensure_env
from hisparse_tools.errors import run_command
from hisparse_tools.paths import this_project
from hisparse_tools.pins import Device
from hisparse_tools.progress import say
from hisparse_tools.server import end_with_parent


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    if "NOX_CURRENT_SESSION" in os.environ:
        # nox that is terminated leaves its commands running.
        end_with_parent()
    project = this_project()
    settings = parse_settings(argv, detect(), str(project.root / "build" / "demo"))
    # Known now or after a minute's build: better now.
    free_port(settings.port)
    say(f"building vLLM with the HiSparse series for {settings.device.value}")
    built = build(project, settings.device)
    say(f"  {built.version}, sha256 {built.sha256}")
    if settings.device is Device.CUDA:
        python, env = ensure_cuda_env(built.path), cuda_run_env()
    else:
        python, env = ensure_env(project, built.path), cpu_run_env()
    session = Path(__file__).with_name("demo_session.py")
    # In place of this process: signals reach the one that owns the server.
    command = [str(python), str(session), settings.to_json()]
    os.execve(python, command, env)


if __name__ == "__main__":
    run_command(main)
