# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Times of the resolver and of the fetch on one GPU, beside two ceilings.

    python bench/kernels.py [--batches 1 16 64] [--query-rows 1 4] [--replays 30]
        [--host-gib 4] [--no-flush] [--no-write]
    python bench/kernels.py --device cpu --dry-run

Needs torch and triton, and no vLLM; with it, the index conversion to compare with is
vLLM's own. A CUDA graph holds a step of all index units, each with hot rows and picks
of its own; printed is the median over many replays, divided by the units. Between
replays the hot rows are put back and the L2 cache is overwritten, unmeasured; a fetch
is measured over the plans of the case, resolve and fetch also together.

The ceilings are measured in the same run: copies on the device, DMA from pinned memory,
and a kernel that gathers rows of pinned memory without a plan, with as many programs as
serve it best. Without a GPU there is a line that says so, and no results.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

if "--dry-run" in sys.argv:
    # Before triton is imported: the decorator decides.
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402

import kernel_report  # noqa: E402
from kernel_baselines import (  # noqa: E402
    Conversion,
    gather_rows,
    plain_conversion,
)
from kernel_cases import (  # noqa: E402
    BATCHES,
    KINDS,
    QUERY_ROWS,
    TINY,
    Case,
    Sizes,
)
from kernel_timing import Timer, Work  # noqa: E402
from option_ranges import in_range  # noqa: E402

# isort: split
from hisparse_core.kernels.tensors import MAX_CLAIMS  # noqa: E402

GATHER_PROGRAMS = (16, 32, 64, 132, 264, 528)
FETCH_PROGRAMS = (8, 16, 32, 64, 132)


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do, in bytes a second.

    Attributes:
        device_copy: Read and written on the device, both counted.
        dma: From pinned memory, by the copy engine.
        gather: From pinned memory, row by row, by a kernel.
        gather_programs: With which the gather was best.
    """

    device_copy: float
    dma: float
    gather: float
    gather_programs: int


@dataclass
class Row:
    """Times of one case in µs; None where there is nothing to measure.

    Attributes:
        kind: Key of KINDS.
        batch: Requests.
        query_rows: Of each.
        plain: The plain conversion.
        plain_counted: The same with counts of valid entries.
        lookup: `lookup` alone.
        resolve: `lookup` and `assign`.
        fetch: `fetch_rows` of one layer.
        both: `lookup`, `assign` and `fetch_rows`.
        rows: Rows that a fetch brings.
        lookup_bytes: Bytes that `lookup` loads and stores for its picks.
        fetch_bytes: Bytes that a fetch brings.
    """

    kind: str
    batch: int
    query_rows: int
    plain: float
    plain_counted: float
    lookup: float
    lookup_bytes: int
    resolve: float | None = None
    fetch: float | None = None
    both: float | None = None
    rows: float = 0.0
    fetch_bytes: float = 0.0


def over_units(case: Case, work: Any) -> Work:
    """Work of all units, one after the other, as a step has it."""

    def run() -> None:
        for number, unit in enumerate(case.units):
            work(unit, number)

    return run


def measure_ceilings(
    timer: Timer, host: torch.Tensor, device: torch.device, is_dry: bool
) -> Ceilings:
    """Measure what the machine can do."""
    size = 1 << 16 if is_dry else min(1 << 30, host.numel())
    source, target = (
        torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)
    )
    copy = timer.measure(partial(target.copy_, source), captured=False)
    flat = host.flatten()[:size]
    dma = timer.measure(partial(target.copy_, flat, non_blocking=True), captured=False)
    count = size // host.shape[1] // (1 if is_dry else 8)
    order = torch.randperm(len(host))[:count].int().to(device)
    out = target[: count * host.shape[1]].view(count, -1)
    best = min(
        (timer.measure(partial(gather_rows, order, host, out, n)), n)
        for n in ((1, 2) if is_dry else GATHER_PROGRAMS)
    )
    per_second = 1e6
    return Ceilings(
        2 * size / copy * per_second,
        size / dma * per_second,
        out.numel() / best[0] * per_second,
        best[1],
    )


def measure_case(case: Case, timer: Timer, convert: Conversion) -> Row:
    """Measure one case."""
    units = len(case.units)
    out, none = case.rows[0], None

    def each(work: Any, restore: Work = case.restore) -> float:
        return timer.measure(over_units(case, work), restore) / units

    def plain(valid: torch.Tensor | None, unit: Any, number: int) -> None:
        convert(case.owner, case.batch_table, unit.positions, out, valid)

    def resolve(unit: Any, number: int) -> None:
        case.lookup(unit, number % 2)
        case.assign(unit, number % 2)

    def both(unit: Any, number: int) -> None:
        resolve(unit, number)
        case.fetch(unit, number % 2)

    row = Row(
        case.kind,
        case.batch,
        case.query_rows,
        plain=each(partial(plain, none)),
        plain_counted=each(partial(plain, case.valid)),
        lookup=each(lambda unit, number: case.lookup(unit, number % 2)),
        lookup_bytes=case.lookup_bytes(),
    )
    case.restore()
    case.lookup(case.units[0])
    if case.miss is not None:
        over_units(case, resolve)()
    case.check()
    if case.miss is None:
        return row
    row.resolve = each(resolve)
    row.rows = case.planned_rows()
    row.fetch_bytes = row.rows * case.sizes.row_bytes
    # The plans of the last replay stay; a fetch changes nothing that it reads.
    row.fetch = each(lambda unit, number: case.fetch(unit, number % 2), lambda: None)
    row.both = each(both)
    return row


def sweep_programs(
    case: Case, timer: Timer, choices: Sequence[int]
) -> dict[int, float]:
    """Times of a fetch with other numbers of programs, in µs."""
    case.restore()
    for unit in case.units:
        case.lookup(unit)
        case.assign(unit)

    def fetch(programs: int, unit: Any, number: int) -> None:
        case.fetch(unit, programs=programs)

    return {
        n: timer.measure(over_units(case, partial(fetch, n))) / len(case.units)
        for n in choices
    }


def host_rows(sizes: Sizes, device: torch.device) -> torch.Tensor:
    """One layer of a host pool, pinned for a GPU."""
    shape = (sizes.host_pages * sizes.block_size, sizes.row_bytes)
    host = torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return host.fill_(7)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    most_rows = MAX_CLAIMS // Sizes.top_k
    most_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    for name, read, default in (
        ("--batches", in_range(int, 1), BATCHES),
        (
            "--query-rows",
            in_range(
                int, 1, most_rows, f"`assign` takes {MAX_CLAIMS:,} picks of a request"
            ),
            QUERY_ROWS,
        ),
    ):
        parser.add_argument(name, type=read, nargs="+", default=[*default])
    parser.add_argument("--replays", type=in_range(int, 1), default=30)
    host_gib = in_range(float, 0.1, round(most_gib, 1), "what this machine has")
    parser.add_argument("--host-gib", type=host_gib, default=4.0)
    parser.add_argument("--no-flush", action="store_true", help="leave the L2 cache")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="with --device cpu: run all of it at tiny sizes, and write nothing",
    )
    args = parser.parse_args(argv)
    if args.dry_run != (args.device == "cpu"):
        parser.error("--device cpu and --dry-run go together: a CPU has no figures")
    return args


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no NVIDIA GPU (torch finds no CUDA device); no results")
        return 0
    device = torch.device(args.device)
    sizes = Sizes()
    if args.dry_run:
        print("dry run on the CPU: these figures mean nothing", flush=True)
        sizes, args.batches, args.replays = TINY, [3], 1
    else:
        page_bytes = sizes.block_size * sizes.row_bytes
        pages = int(args.host_gib * (1 << 30)) // page_bytes
        sizes = Sizes(host_pages=pages)
    host = host_rows(sizes, device)
    timer = Timer(device, args.replays, flush=not args.no_flush)
    ceilings = measure_ceilings(timer, host, device, args.dry_run)
    name, convert = plain_conversion()
    rows, sweep = [], {}
    with torch.inference_mode():
        for query_rows in args.query_rows:
            for batch in args.batches:
                for kind in KINDS:
                    case = Case(sizes, kind, batch, query_rows, host, device)
                    rows.append(measure_case(case, timer, convert))
                    print(f"  {kernel_report.line(rows[-1])}", flush=True)
                    if (kind, query_rows, batch) == ("13 % miss", 1, args.batches[-1]):
                        choices = (1, 2) if args.dry_run else FETCH_PROGRAMS
                        sweep = sweep_programs(case, timer, choices)
                    del case
    about = kernel_report.about(device, name, args, asdict(sizes))
    report = kernel_report.Report(about, ceilings, rows, sweep)
    print(report.text())
    if not args.dry_run and not args.no_write:
        print(f"written: {', '.join(map(str, report.write()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
