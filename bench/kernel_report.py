# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What `kernels.py` found, as text and as JSON, beside the targets."""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton

from kernel_cases import BATCHES, QUERY_ROWS

if TYPE_CHECKING:
    from kernels import Ceilings, Row

RESULTS = Path(__file__).with_name("results")
TARGETS_OF = "H200"
HEADS = (
    "case", "batch", "query rows", "plain µs", "plain, counted µs", "lookup µs",
    "of device copies", "lookup + assign µs", "rows", "fetch µs", "of gather",
    "of DMA", "all three µs",
)  # fmt: skip


Case = tuple[int, int]  # batch, query rows


@dataclass(frozen=True)
class Target:
    """Something that is to hold on the GPU it was set for.

    Attributes:
        text: What it says.
        rows: Which cases it is about.
        cases: Those that must be measured.
        found: The figure of a case; None: not measured.
        limit: Most, or least, that the worst may be.
        is_least: Whether `limit` is the least.
    """

    text: str
    rows: Callable[[Row], bool]
    cases: Sequence[Case]
    found: Callable[[Row, Ceilings], float | None]
    limit: float
    is_least: bool = False

    def judge(self, rows: Sequence[Row], ceilings: Ceilings, gpu: str) -> str:
        """The worst figure, and whether it is good enough, where that is known."""
        found: dict[Case, float] = {}
        for row in filter(self.rows, rows):
            figure = self.found(row, ceilings)
            if figure is not None:
                found[row.batch, row.query_rows] = figure
        missing = [case for case in self.cases if case not in found]
        if len(missing) == len(self.cases):
            return "not measured"
        if missing:
            names = (f"batch {batch} with {rows} query rows" for batch, rows in missing)
            return f"not measured: {', '.join(names)}"
        worst = (min if self.is_least else max)(found.values())
        if TARGETS_OF not in gpu:
            return f"{worst:.3g}, not judged"
        is_met = worst >= self.limit if self.is_least else worst <= self.limit
        return f"{worst:.3g}, {'met' if is_met else 'not met'}"


def _share(row: Row, ceilings: Ceilings) -> float | None:
    if row.fetch is None:
        return None
    return 1e6 * row.fetch_bytes / row.fetch / ceilings.gather


TARGETS = (
    Target(
        "all resident: lookup at most 1.2 times the plain conversion, every shape",
        lambda row: row.kind == "all resident",
        [*product(BATCHES, QUERY_ROWS)],
        lambda row, _: row.lookup / row.plain,
        1.2,
    ),
    Target(
        "lookup + assign at most 15 µs at 4 query rows, 13 % misses, every batch",
        lambda row: (row.query_rows, row.kind) == (4, "13 % miss"),
        [(batch, 4) for batch in BATCHES],
        lambda row, _: row.resolve,
        15.0,
    ),
    Target(
        "lookup + assign + fetch at most 80 µs at batch 16, 1 query row, 13 % misses",
        lambda row: (row.query_rows, row.batch, row.kind) == (1, 16, "13 % miss"),
        [(16, 1)],
        lambda row, _: row.both,
        80.0,
    ),
    Target(
        "fetch at least 0.9 of the gather ceiling at batch 16 and above, all misses",
        lambda row: row.batch >= 16 and row.kind == "all miss",
        [*product([batch for batch in BATCHES if batch >= 16], QUERY_ROWS)],
        _share,
        0.9,
        is_least=True,
    ),
)


def _cell(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def line(row: Row) -> str:
    """One case while the others are still running."""
    return (
        f"{row.kind}, batch {row.batch}, {row.query_rows} query rows: lookup "
        f"{_cell(row.lookup)} µs, with assign {_cell(row.resolve)}, fetch "
        f"{_cell(row.fetch)}, plain {_cell(row.plain)}"
    )


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip().partition("\n")[0] or "unknown"


def about(
    device: torch.device, conversion: str, args: argparse.Namespace, sizes: dict
) -> dict[str, Any]:
    """The machine, the versions and the shapes of a run."""
    is_cuda = device.type == "cuda"
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(device) if is_cuda else "none",
        "driver": _driver() if is_cuda else "none",
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "plain conversion": conversion,
        "replays": args.replays,
        "L2 cache": "left as it was" if args.no_flush else "overwritten each time",
        "sizes": sizes,
    }


@dataclass(frozen=True)
class Report:
    """A whole run.

    Attributes:
        about: From `about`.
        ceilings: Measured in the same run.
        rows: By case.
        sweep: Times of a fetch by its number of programs, in µs.
    """

    about: dict[str, Any]
    ceilings: Ceilings
    rows: Sequence[Row]
    sweep: dict[int, float]

    def targets(self) -> list[tuple[str, str]]:
        """Every target, and what became of it."""
        known = (self.rows, self.ceilings, self.about["gpu"])
        return [(target.text, target.judge(*known)) for target in TARGETS]

    def _table(self) -> Iterable[str]:
        yield f"| {' | '.join(HEADS)} |"
        yield f"|{' --- |' * len(HEADS)}"
        for row in self.rows:
            of_copies = 1e6 * row.lookup_bytes / row.lookup / self.ceilings.device_copy
            cells = [row.kind, str(row.batch), str(row.query_rows), _cell(row.plain)]
            cells += [_cell(row.plain_counted), _cell(row.lookup)]
            cells += [f"{100 * of_copies:.0f} %", _cell(row.resolve)]
            shares = ["-", "-"]
            if row.fetch:
                rate = 1e6 * row.fetch_bytes / row.fetch
                ends = (self.ceilings.gather, self.ceilings.dma)
                shares = [f"{100 * rate / end:.0f} %" for end in ends]
            fetched = _cell(row.rows if row.fetch else None, 0)
            cells += [fetched, _cell(row.fetch), *shares, _cell(row.both)]
            yield f"| {' | '.join(cells)} |"

    def text(self) -> str:
        """The report as markdown."""
        known, ends = self.about, self.ceilings
        sizes = ", ".join(f"{k} {v:,}" for k, v in known["sizes"].items())
        head = ", ".join(f"{k} {v}" for k, v in known.items() if k != "sizes")
        lines = [
            f"# Times of the kernels, {known['date']}",
            "",
            f"{head}.",
            f"Shapes: {sizes}. Times are for one index unit, medians in µs.",
            "",
            f"Ceilings: copies on the device {ends.device_copy / 1e9:,.0f} GB/s, read "
            f"and written; DMA from pinned memory {ends.dma / 1e9:.1f} GB/s; gather of "
            f"rows from it {ends.gather / 1e9:.1f} GB/s, {ends.gather_programs} "
            "programs.",
            "",
            *self._table(),
            "",
            "A lookup's bytes: position, frame, code and row of every pick; the block "
            "of a resident row; the hot slot of another, and for a hit its block and "
            "the mark of its use. Words that picks share count for each of them.",
            "",
        ]
        times = ", ".join(f"{n}: {t:.1f}" for n, t in self.sweep.items())
        times = times or "not measured"
        lines += [f"Fetch by number of programs, 13 % misses, µs: {times}", ""]
        lines += [f"Targets, set for an {TARGETS_OF}:", ""]
        lines += [f"- {text}: {verdict}" for text, verdict in self.targets()]
        return "\n".join(lines) + "\n"

    def write(self) -> list[Path]:
        """Write text and figures to the results; the files."""
        gpu = re.sub(r"[^a-z0-9]+", "-", self.about["gpu"].lower()).strip("-")
        stem = RESULTS / f"kernels-{gpu}-{self.about['date']}"
        figures = {
            "about": self.about,
            "ceilings": asdict(self.ceilings),
            "rows": [asdict(row) for row in self.rows],
            "fetch_by_programs": self.sweep,
            "targets": dict(self.targets()),
        }
        paths = [stem.with_suffix(".md"), stem.with_suffix(".json")]
        paths[0].write_text(self.text(), encoding="utf-8")
        paths[1].write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        return paths
