# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Sessions: wiring only; the commands are in scripts/."""

import logging
import os
import sys

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = []
nox.options.default_venv_backend = "none"


def _run(session: nox.Session, command: str, *args: str) -> None:
    session.run(
        sys.executable,
        os.path.join("scripts", command),
        *args,
        *session.posargs,
        external=True,
        silent=False,
        # Time to take down servers and remove what is half-written.
        interrupt_timeout=60,
        terminate_timeout=60,
    )


@nox.session
def build(session: nox.Session) -> None:
    """Fetch, verify, apply, prove and repack the published wheel into dist/."""
    _run(session, "build.py")


@nox.session
def demo(session: nox.Session) -> None:
    """Build, serve a small model without and with HiSparse, and compare."""
    _run(session, "demo.py")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the whole default test set, from nothing, without a GPU."""
    # pytest's closing line is to be the last one; the exit status tells nox's part.
    logging.getLogger("nox").setLevel(logging.CRITICAL)
    _run(session, "tests.py")


@nox.session
def soak(session: nox.Session) -> None:
    """Serve random traffic over pools that are always short, for about two hours."""
    os.environ.setdefault("HISPARSE_SOAK_REQUESTS", "2000")
    test = os.path.join("tests", "e2e", "test_hisparse_soak.py")
    _run(session, "tests.py", "-s", "--timeout", "14400", test)


@nox.session
def bench(session: nox.Session) -> None:
    """Run a benchmark of bench/ in the CPU environment."""
    _run(session, "bench.py")


@nox.session
def compile(session: nox.Session) -> None:
    """Compile every kernel for every GPU target, without a GPU."""
    _run(session, "compile_kernels.py")


@nox.session
def gpu(session: nox.Session) -> None:
    """Run on one NVIDIA GPU what only a GPU can show, and the kernels' benchmark."""
    _run(session, "gpu.py")


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff and mypy as vLLM configures them."""
    _run(session, "lint.py")


@nox.session
def source(session: nox.Session) -> None:
    """Make a maintainer's tree with one commit per patch."""
    _run(session, "source.py")


@nox.session
def refresh(session: nox.Session) -> None:
    """Export a maintainer's tree to patches/ and vllm_overlay/."""
    _run(session, "refresh.py")


@nox.session
def check(session: nox.Session) -> None:
    """Check every patch, and that the series applies exactly."""
    _run(session, "check.py")


@nox.session
def upstream(session: nox.Session) -> None:
    """Run vLLM's own CPU-runnable tests against the built wheel."""
    _run(session, "upstream_tests.py")


@nox.session
def mutants(session: nox.Session) -> None:
    """Break the code on purpose: every break must fail a test."""
    _run(session, "mutants.py")
