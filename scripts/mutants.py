# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Break the code as tests/mutants.toml lists it; every break must fail a test."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import PurePosixPath
from queue import SimpleQueue

from hisparse_tools.build import cpu_python
from hisparse_tools.errors import ToolError, run_command
from hisparse_tools.mutants import (
    Bench,
    Fate,
    Mutant,
    chosen,
    copy_project,
    read_mutants,
)
from hisparse_tools.paths import scratch, this_project
from hisparse_tools.progress import Bar, say, step


def _check_baseline(bench: Bench, mutants: list[Mutant]) -> None:
    # One run for each of the test folders: their fixtures do not share a process.
    folders: dict[str, set[str]] = {}
    for mutant in mutants:
        for test in mutant.tests:
            folders.setdefault(str(PurePosixPath(test).parent), set()).add(test)
    for folder, tests in sorted(folders.items()):
        with step(f"running {len(tests)} tests of {folder} on the unbroken code"):
            if bench.pytest(tuple(sorted(tests))) != 0:
                raise ToolError(
                    "a test fails on the unbroken code, so it proves nothing:\n"
                    + bench.log_tail(),
                    "mend it first, or name another test in tests/mutants.toml",
                )


def _try_all(benches: list[Bench], mutants: list[Mutant]) -> list[Fate]:
    """Try every mutant, as many at a time as there are benches; say each fate."""
    idle: SimpleQueue[Bench] = SimpleQueue()
    for bench in benches:
        idle.put(bench)

    def one(mutant: Mutant) -> tuple[Fate, float, str]:
        bench = idle.get()
        try:
            start = time.monotonic()
            fate = bench.try_mutant(mutant)
            return fate, time.monotonic() - start, bench.log_tail()
        finally:
            idle.put(bench)

    fates: list[Fate] = []
    pool = ThreadPoolExecutor(len(benches))
    with Bar("breaking", len(mutants)) as bar:
        try:
            trials = {pool.submit(one, mutant): mutant for mutant in mutants}
            for trial in as_completed(trials):
                mutant = trials[trial]
                fate, seconds, log = trial.result()
                fates.append(fate)
                bar.clear()
                say(f"{fate.value:8} {seconds:6.1f} s  {mutant.file}: {mutant.why}")
                if fate is Fate.BROKEN:
                    say(log)
                bar.advance(1)
        finally:
            pool.shutdown(cancel_futures=True)
    return fates


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    project = this_project()
    parser = argparse.ArgumentParser(prog="nox -s mutants --", description=__doc__)
    parser.add_argument(
        "words", nargs="*", help="only mutants whose file or reason has one of them"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        choices=range(1, 65),
        metavar="N",
        help="mutants to try at a time, 1 to 64 (default: 1); each needs a core and, "
        "for the end-to-end ones, 3 GB",
    )
    args = parser.parse_args(argv)
    known = read_mutants(project.root / "tests" / "mutants.toml")
    mutants = chosen(known, args.words)
    python = cpu_python(project)
    with scratch() as work:
        benches = []
        for number in range(args.jobs):
            folder = work / str(number)
            folder.mkdir()
            copy_project(project, folder / "project")
            benches.append(Bench(folder / "project", python, folder))
        _check_baseline(benches[0], mutants)
        fates = _try_all(benches, mutants)
    killed = fates.count(Fate.KILLED)
    say(f"{killed} of {len(fates)} mutants killed")
    return 0 if killed == len(fates) else 1


if __name__ == "__main__":
    run_command(main)
