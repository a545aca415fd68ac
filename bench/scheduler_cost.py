# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""CPU time of the scheduler per decode step, with HiSparse and without.

    python bench/scheduler_cost.py [--requests 64 256] [--tokens 34500 138000]
        [--rounds 15] [--unpatched PYTHONPATH] [--quick]

vLLM's own scheduler, cache manager and connector run without a model, at the block
counts of GLM-5.3: a step is `schedule` and `update_from_output` for requests that all
decode. Three variants, each in a process of its own:

- off: HiSparse not configured, or the unpatched release where `--unpatched` names the
  folder it is installed in;
- resident: HiSparse on, the device holds all pages;
- mixed: HiSparse on, the device holds a quarter of them; requests hold hot leases.

Shared machines are noisy, so the variants take turns: a round is 64 steps of each, one
after the other, in alternating order, and fills one page of every request. CPU time of
the thread is measured, not wall time. Each round gives a median over its quiet steps
(no page is filled) and a mean over all; a ratio compares the two variants within a
round. Printed are the medians over all rounds, and the quartiles of the ratio.

The bookkeeping is every object that the residency core reaches; it is proportional to
the blocks of the device pool, of which these contexts take far more than a GPU has.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from option_ranges import in_range

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from hisparse_tools.paths import user_path  # noqa: E402
from hisparse_tools.progress import Steps  # noqa: E402

WORLD = Path(__file__).with_name("scheduler_world.py")
VARIANTS = ("off", "resident", "mixed")
STEPS = 64  # of a round: one page of every request


@dataclass
class Variant:
    """A scheduler in a process, and what its rounds took.

    Attributes:
        name: One of VARIANTS.
        process: Runs `scheduler_world.py`.
        about: What it said of itself.
        quiet: By round, median seconds of the steps in which no page was filled.
        mean: By round, mean seconds of all steps.
    """

    name: str
    process: subprocess.Popen
    about: dict[str, Any] = field(default_factory=dict)
    quiet: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)

    def read(self) -> Any:
        """The next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"error: the process of {self.name!r} ended; see above")
        return json.loads(line)

    def begin(self) -> Iterator[int]:
        """Wait until all requests decode; yields how many do."""
        while isinstance(answer := self.read(), int):
            yield answer
        self.about = answer

    def run_round(self, keep: bool) -> None:
        """Run one round; a first one only warms up."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{STEPS}\n")
        self.process.stdin.flush()
        steps = self.read()
        if keep:
            times = [seconds for seconds, is_quiet in steps if is_quiet]
            self.quiet.append(statistics.median(times))
            self.mean.append(statistics.mean(seconds for seconds, _ in steps))


def start(name: str, requests: int, tokens: int, args: argparse.Namespace) -> Variant:
    """Start a variant; it fills its requests before it answers."""
    env = {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    if name == "off" and args.unpatched:
        env["PYTHONPATH"] = args.unpatched
    sizes = [str(n) for n in (requests, tokens, (args.rounds + 1) * STEPS)]
    return Variant(
        name,
        subprocess.Popen(
            [sys.executable, str(WORLD), name, *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        ),
    )


def measure(requests: int, tokens: int, args: argparse.Namespace) -> list[Variant]:
    """Run all variants of one shape, taking turns."""
    variants: list[Variant] = []
    total = len(VARIANTS) * (requests + args.rounds + 1)
    try:
        with Steps(f"{requests} requests of {tokens:,} tokens", total) as steps:
            for name in VARIANTS:
                variants.append(start(name, requests, tokens, args))
            for variant in variants:
                steps.begin(f"starting {variant.name}")
                for number in variant.begin():
                    if number < requests:
                        steps.begin(f"{variant.name}, {number} of them decode")
            for number in range(args.rounds + 1):
                for variant in variants if number % 2 else reversed(variants):
                    title = f"round {number}" if number else "warming up"
                    steps.begin(f"{title}, {variant.name}")
                    variant.run_round(keep=number > 0)
    finally:
        for variant in variants:
            variant.process.kill()
            variant.process.wait()
    return variants


def ratio(times: list[float], base: list[float]) -> tuple[float, str]:
    """Median of the ratios by round, and the median with its quartiles as text."""
    ratios = [a / b for a, b in zip(times, base, strict=True)]
    middle = statistics.median(ratios)
    if len(ratios) < 2:
        return middle, f"{middle:.2f}"
    low, _, high = statistics.quantiles(ratios, n=4)
    return middle, f"{middle:.2f} ({low:.2f}–{high:.2f})"


def print_machine(args: argparse.Namespace) -> None:
    """What it was measured on."""
    cpu = "unknown CPU"
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [i for i in info.read_text().splitlines() if i.startswith("model name")]
        cpu = lines[0].split(":")[1].strip() if lines else cpu
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    rounds = "1 round" if args.rounds == 1 else f"{args.rounds} rounds"
    print(
        f"{now}; {cpu}, {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.1f}; Python {platform.python_version()}; "
        f"{rounds} of {STEPS} steps, variants taking turns",
        flush=True,
    )


def print_rows(variants: list[Variant], requests: int, tokens: int) -> None:
    """One row for each variant of a shape."""
    off = variants[0]
    for variant in variants:
        about = variant.about
        quiet = [f"{1e6 * statistics.median(variant.quiet):.0f}", "1"]
        every = [f"{1e6 * statistics.median(variant.mean):.0f}", "1"]
        if variant is not off:
            quiet[1] = ratio(variant.quiet, off.quiet)[1]
            every[1] = ratio(variant.mean, off.mean)[1]
        cells = [variant.name, requests, f"{tokens:,}"]
        cells += [f"{about['device_blocks']:,}", about["mixed"], *quiet, *every]
        cells += [
            f"{about[name] / (1 << 20):,.0f}"
            for name in ("bookkeeping_bytes", "peak_rss_bytes")
        ]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_growth(by_shape: dict[tuple[int, int], list[Variant]]) -> None:
    """How a quiet step changes from the shortest to the longest context."""
    lengths = sorted({tokens for _, tokens in by_shape})
    if len(lengths) < 2:
        return
    print()
    for requests in sorted({requests for requests, _ in by_shape}):
        short, long = by_shape[requests, lengths[0]], by_shape[requests, lengths[-1]]
        changes = [
            f"{b.name} {statistics.median(b.quiet) / statistics.median(a.quiet):.2f}x"
            for a, b in zip(short, long, strict=True)
        ]
        print(
            f"{requests} requests, a quiet step at {lengths[-1]:,} tokens against "
            f"{lengths[0]:,}: {', '.join(changes)}"
        )


def unpatched_path(text: str) -> str:
    """Check folders that are to be PYTHONPATH for the unpatched release."""
    folders = [user_path(part).resolve() for part in text.split(os.pathsep)]
    found = [folder for folder in folders if (folder / "vllm/__init__.py").is_file()]
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text} has no vllm; give the folder that the unpatched release is "
            "installed in, such as its site-packages"
        )
    if (found[0] / "vllm/v1/hisparse").exists():
        raise argparse.ArgumentTypeError(
            f"the vllm in {found[0]} has HiSparse; give the folder of one without it"
        )
    return os.pathsep.join(map(str, folders))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    requests, tokens = in_range(int, 1, 16_384), in_range(int, STEPS, 1_000_000)
    parser.add_argument("--requests", type=requests, nargs="+")
    parser.add_argument("--tokens", type=tokens, nargs="+")
    parser.add_argument("--rounds", type=in_range(int, 1))
    parser.add_argument(
        "--unpatched",
        metavar="PYTHONPATH",
        type=unpatched_path,
        help="folder with the unpatched release, of which 'off' is measured",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="show that it runs: 16 requests of 34,500 tokens and one round, unless "
        "told otherwise",
    )
    args = parser.parse_args(argv)
    args.requests = args.requests or ([16] if args.quick else [64, 256])
    args.tokens = args.tokens or ([34_500] if args.quick else [34_500, 138_000])
    args.rounds = args.rounds or (1 if args.quick else 15)
    return args


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    args = parse(argv)
    print_machine(args)
    by_shape: dict[tuple[int, int], list[Variant]] = {}
    for requests in args.requests:
        for tokens in args.tokens:
            variants = measure(requests, tokens, args)
            if not by_shape:
                print_versions(variants)
            by_shape[requests, tokens] = variants
            print_rows(variants, requests, tokens)
    print_growth(by_shape)


def print_versions(variants: list[Variant]) -> None:
    """What is compared with what, and the head of the table."""
    for variant in variants[:2]:
        about = variant.about
        kind = "patched" if about["is_patched"] else "unpatched release"
        state = "not configured" if variant.name == "off" else "on"
        print(
            f"{'off' if variant.name == 'off' else 'others'}: vLLM {about['version']}, "
            f"{kind}" + (f", HiSparse {state}" if about["is_patched"] else "")
        )
    print()
    heads = ["variant", "requests", "tokens", "device blocks", "mixed"]
    heads += ["quiet µs", "ratio (quartiles)", "all steps µs", "ratio (quartiles)"]
    heads += ["bookkeeping MiB", "peak RSS MiB"]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")


if __name__ == "__main__":
    main(sys.argv[1:])
