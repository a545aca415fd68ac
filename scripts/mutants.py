# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Break the code as tests/mutants.toml lists it; every break must fail a test."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from hisparse_tools.build import build
from hisparse_tools.env import ensure_env
from hisparse_tools.errors import ToolError, run_command
from hisparse_tools.mutants import Bench, Fate, Mutant, copy_project, read_mutants
from hisparse_tools.paths import scratch, this_project
from hisparse_tools.pins import Device
from hisparse_tools.progress import Bar, say, step


def _check_baseline(bench: Bench, mutants: list[Mutant]) -> None:
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with step(f"running {len(tests)} tests on the unbroken code"):
        if bench.pytest(tuple(tests)) != 0:
            raise ToolError(
                "a test fails on the unbroken code, so it proves nothing:\n"
                + bench.log_tail(),
                "mend it first, or name another test in tests/mutants.toml",
            )


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    project = this_project()
    parser = argparse.ArgumentParser(prog="nox -s mutants --", description=__doc__)
    parser.add_argument(
        "words", nargs="*", help="only mutants whose file or reason has one of them"
    )
    args = parser.parse_args(argv)
    mutants = [
        mutant
        for mutant in read_mutants(project.root / "tests" / "mutants.toml")
        if any(word in f"{mutant.file} {mutant.why}" for word in args.words or [""])
    ]
    if not mutants:
        parser.error(f"no mutant has any of {args.words} in its file or reason")
    built = build(project, Device.CPU)
    python = ensure_env(project, built.path)
    fates: list[Fate] = []
    with scratch() as work, Bar("breaking", len(mutants)) as bar:
        copy_project(project, work / "project")
        bench = Bench(work / "project", python, work)
        _check_baseline(bench, mutants)
        for mutant in mutants:
            start = time.monotonic()
            fate = bench.try_mutant(mutant)
            fates.append(fate)
            bar.clear()
            spent = time.monotonic() - start
            say(f"{fate.value:8} {spent:6.1f} s  {mutant.file}: {mutant.why}")
            if fate is Fate.BROKEN:
                say(bench.log_tail())
            bar.advance(1)
    killed = fates.count(Fate.KILLED)
    say(f"{killed} of {len(fates)} mutants killed")
    return 0 if killed == len(fates) else 1


if __name__ == "__main__":
    run_command(main)
