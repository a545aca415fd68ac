# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Which rule should decide what leaves a hot buffer? Miss rates on synthetic streams.

    python bench/policy/study.py [--out FOLDER] [--seeds N] [--top-k N] [--quick]
    python bench/policy/study.py --calibrate

It compares the LRU of the resolver with other rules and with the offline optimum, for
hot buffers of 1 to 4 times top-k. The streams are calibrated to miss rates that were
published for a real model (fitting.py names the source); then their overlap and their
kind are varied. It prints a report, and with `--out` writes it and two charts there.

A simulation of picks, not of a device: it counts misses, never time.
"""

import argparse
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import verdict
from fitting import CALIBRATED, calibrate
from rules import ONLINE, OPTIMUM
from simulation import Measured, mean, measure
from streams import Model, Shape
from verdict import SIZE, SIZES, Stream, Study

_CONTEXTS = (32_768, 138_000)
_KINDS = {
    "popularity and noise only": Model(1.0, 0.0, 1.0, 0.35),
    "drift and noise only": Model(0.0, 1.0, 30.0, 0.1),
}
_TRIALS = 60
_EVERY_RULE = (*ONLINE, OPTIMUM)


@dataclass(frozen=True)
class Defaults:
    """What a study takes where the command line says nothing else.

    Attributes:
        top_k, context, steps, warm_up: See `Shape`.
        seeds: Calibrated streams.
        divisor: The contexts of other streams, and the newest rows that get a bonus,
            are so many times fewer.
        paces: Of the sweep; 1 is taken from the calibrated stream.
    """

    top_k: int
    context: int
    steps: int
    warm_up: int
    seeds: int
    divisor: int
    paces: Sequence[float]


# Paces for overlaps of about 0.95 to 0.5; 1 is the calibrated stream.
_FULL = Defaults(
    2048, 65_536, 1280, 512, 3, 1, (0.17, 0.3, 0.45, 0.65, 0.8, 1.0, 1.25, 1.5, 1.8)
)
_QUICK = Defaults(128, 4096, 400, 200, 1, 16, (0.65, 1.0, 1.5))


@dataclass
class Progress:
    """Lines on standard error, one for each stream."""

    total: int
    done: int = 0

    def say(self, text: str) -> None:
        """Print a line at once."""
        print(text, file=sys.stderr, flush=True)

    def measure(
        self, title: str, model: Model, shape: Shape, seed: int, sizes: Sequence[float]
    ) -> Measured:
        """Measure all rules on one stream, and say so."""
        start = time.monotonic()
        cases = [(rule, size) for rule in _EVERY_RULE for size in sizes]
        measured = measure(model, shape, seed, cases)
        self.done += 1
        self.say(
            f"[{self.done}/{self.total}] {title}, seed {seed}: overlap "
            f"{measured.overlap:.2f}, {time.monotonic() - start:.1f} s"
        )
        return measured


def run(shape: Shape, seeds: int, divisor: int, paces: Sequence[float]) -> Study:
    """Run the study.

    Args:
        shape: Of the calibrated stream.
        seeds: Streams that are averaged where the calibrated one is measured.
        divisor: See `Defaults`.
        paces: See `Defaults`.
    """
    if seeds < 1:
        raise ValueError(f"--seeds is {seeds}; give 1 or more")
    shortest = min(_CONTEXTS) // divisor
    if shape.top_k >= shortest:
        raise ValueError(
            f"--top-k is {shape.top_k:,}; give less than {shortest:,}, the context of "
            "another stream that is measured"
        )
    model = CALIBRATED.scaled(divisor)
    others = list(_other_streams(shape, divisor))
    progress = Progress(seeds + len(paces) - paces.count(1.0) + len(others))
    by_seed = [
        progress.measure("calibrated", model, shape, seed, SIZES)
        for seed in range(seeds)
    ]
    sweep = []
    for pace in paces:
        title = f"pace {pace:g}"
        measured = by_seed[0]
        if pace != 1:
            measured = progress.measure(title, model.at_pace(pace), shape, 0, [SIZE])
        sweep.append(Stream(title, measured))
    kinds = [
        Stream(title, progress.measure(title, kind, kind_shape, 0, [SIZE]))
        for title, kind, kind_shape in others
    ]
    return Study(divisor > 1, model, shape, by_seed, mean(by_seed), sweep, kinds)


def _other_streams(shape: Shape, divisor: int) -> Iterator[tuple[str, Model, Shape]]:
    for full_context in _CONTEXTS:
        context = full_context // divisor
        other = replace(shape, context=context)
        yield f"context {context:,}", CALIBRATED.scaled(divisor), other
    for title, model in _KINDS.items():
        yield title, model.scaled(divisor), shape


def _date() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, what in (
        ("top_k", "rows that a step picks"),
        ("context", "rows at first"),
        ("steps", "steps"),
        ("warm_up", "first steps, which are not counted"),
        ("seeds", "calibrated streams"),
    ):
        full, quick = getattr(_FULL, name), getattr(_QUICK, name)
        text = f"{what} (default: {full:,}; with --quick {quick:,})"
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, metavar="N", help=text)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write files there")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--quick", action="store_true", help="show that it runs, at a 16th of the rows"
    )
    kind.add_argument(
        "--calibrate", action="store_true", help="fit the stream, and end"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    args = parser.parse_args(argv)
    defaults = _QUICK if args.quick else _FULL
    for name, value in vars(args).items():
        if value is None:
            setattr(args, name, getattr(defaults, name, None))
    try:
        if args.out:
            # Before the work, which would be lost.
            args.out.mkdir(parents=True, exist_ok=True)
        shape = Shape(args.top_k, args.context, args.steps, args.warm_up)
        if args.calibrate:
            model = calibrate(shape, (0, 1), _TRIALS, Progress(0).say)
            print(f"fitted: {model}")
            return
        study = run(shape, args.seeds, defaults.divisor, defaults.paces)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--out is {args.out}: {error}; name a folder to write to")
    command = " ".join(["python bench/policy/study.py", *argv])
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    name = f"policy-{_date()}"
    charts = {f"{name}-{key}.svg": text for key, text in verdict.charts(study).items()}
    seconds = time.process_time()
    about = f"{_date()}; {versions}; {seconds:.0f} s of CPU time"
    text = verdict.text(study, command, about, list(charts) if args.out else [])
    print(text, end="")
    if args.out:
        for file, content in {f"{name}.md": text, **charts}.items():
            (args.out / file).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
