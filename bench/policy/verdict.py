# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What the study found, as Markdown and as charts. Every conclusion is computed."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import plots
from fitting import FITTED, HELD_OUT, SOURCE
from rules import LRU, ONLINE, OPTIMUM, Rule, Work
from simulation import Key, Measured
from streams import Model, Shape

SIZES = (1, 1.5, 2, 3, 4)
SIZE = 2  # that the design gives a hot buffer, and the one at which rules are judged
# A rule qualifies if it wins back this much of the gap, at no more device work.
NEEDED = 0.25
# GLM-5.3 with its MTP layer: docs/design.md, D7.
TOP_K = 2048
_ROW_BYTES, _LAYERS, _UNITS = 656, 79, 22
_SHOWN = (
    "LRU",
    "LRU, fetched halfway",
    "LRU, fetched oldest",
    "clock",
    "LRU, low scores first",
    "score now",
    "optimum",
)
_CHARTED = ("FIFO", "random", "LRU", "clock", "LRU, low scores first", "score now")


@dataclass(frozen=True)
class Stream:
    """One stream that was measured at SIZE only, or at all sizes."""

    title: str
    measured: Measured


@dataclass(frozen=True)
class Study:
    """All that was measured.

    Attributes:
        is_quick: Whether it only shows that the study runs.
        model: The calibrated one.
        shape: Of its streams.
        by_seed: Its streams.
        mean: Their mean.
        sweep: Streams whose scores change at another pace, by falling overlap.
        others: Streams of another length or kind.
    """

    is_quick: bool
    model: Model
    shape: Shape
    by_seed: Sequence[Measured]
    mean: Measured
    sweep: Sequence[Stream]
    others: Sequence[Stream]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def percent(share: float) -> str:
    """A share with one decimal."""
    return f"{100 * share:.1f} %"


def _whole(share: float) -> int:
    return round(100 * share)


def _won(study: Study, rule: Rule) -> tuple[float, float, float]:
    """Share of the gap at SIZE: of the mean rates, and the range over the seeds."""
    shares = [measured.won(rule.name, SIZE) for measured in study.by_seed]
    return study.mean.won(rule.name, SIZE), min(shares), max(shares)


def qualified(study: Study) -> list[Rule]:
    """Rules that win enough on every calibrated stream, at no more device work."""
    return [
        rule
        for rule in ONLINE
        if rule.work is not Work.MORE and _won(study, rule)[1] >= NEEDED
    ]


def _calibration(study: Study) -> str:
    def row(key: Key, published: float, use: str) -> list[str]:
        got = study.mean.rates[key]
        difference = f"{100 * (got - published):+.1f}"
        where = f"{key[0]}, {key[1]:g} x top-k"
        return [where, percent(published), percent(got), difference, use]

    rows = [row(key, rate, "fitted") for key, rate in FITTED.items()]
    rows += [row(key, rate, "not fitted: a check") for key, rate in HELD_OUT.items()]
    return table(["", "published", "here", "points", ""], rows)


def _rates(study: Study) -> str:
    rows = [
        [rule.name, *(percent(study.mean.rates[rule.name, size]) for size in SIZES)]
        for rule in (*ONLINE, OPTIMUM)
    ]
    return table(["rule", *(f"{size:g} x top-k" for size in SIZES)], rows)


def _work(study: Study) -> str:
    rows = []
    for rule in ONLINE:
        share, low, high = _won(study, rule)
        won = f"{_whole(share)} % ({_whole(low)} to {_whole(high)})"
        rows.append([rule.name, won, rule.work.value, rule.needs])
    heads = ["rule", "of the gap won (seeds)", "device work", "what it needs there"]
    return table(heads, rows)


def _bytes(study: Study) -> str:
    """What the best rule that looks at scores would save, and read."""
    if study.shape.top_k != TOP_K:
        return f"What rules would save on GLM-5.3 is told at its top-k ({TOP_K:,}).\n"
    rates = study.mean.rates
    lru, now = rates[LRU.name, SIZE], rates["score now", SIZE]
    megabyte = _ROW_BYTES * _LAYERS * TOP_K / 1e6
    # Slots without a hit: the rule's own misses decide how many.
    idle = round((SIZE - 1 + now) * TOP_K)
    return (
        f"For GLM-5.3 (fp8 rows of {_ROW_BYTES} bytes in {_LAYERS} layers, {_UNITS} "
        f"index units) score now would bring {megabyte * now:.1f} MB from the host in "
        f"each step of a request, LRU {megabyte * lru:.1f} MB; it would read about "
        f"{idle:,} logits in each unit. That is arithmetic: what the reads and the "
        "selection take has not been measured.\n"
    )


def _streams(streams: Sequence[Stream]) -> str:
    rows = []
    for stream in streams:
        measured = stream.measured
        cells = [stream.title, f"{measured.overlap:.2f}"]
        for name in _SHOWN:
            cell = percent(measured.rates[name, SIZE])
            if name not in (LRU.name, OPTIMUM.name):
                cell += f" ({_whole(measured.won(name, SIZE)):+d})"
            cells.append(cell)
        rows.append(cells)
    return table(["stream", "overlap", *_SHOWN], rows)


def verdict(study: Study) -> str:
    """Whether any rule should replace LRU, in words."""
    rates = study.mean.rates
    lru, best = rates[LRU.name, SIZE], rates[OPTIMUM.name, SIZE]
    others = [rule for rule in ONLINE if rule is not LRU]
    no_more = [rule for rule in others if rule.work is not Work.MORE]
    more = [rule for rule in others if rule.work is Work.MORE]
    lines = [
        f"At {SIZE} x top-k LRU misses {percent(lru)} and the optimum {percent(best)}: "
        f"a gap of {100 * (lru - best):.1f} points."
    ]
    good = qualified(study)
    if good:
        names = ", ".join(rule.name for rule in good)
        lines.append(f"At no more device work, these win back a quarter: **{names}**.")
    else:
        lines.append(
            "**No rule wins back a quarter of it at no more device work: LRU stays.**"
        )
    for work, rules in ((Work.NO_MORE, no_more), (Work.MORE, more)):
        rule = max(rules, key=lambda rule: _won(study, rule)[0])
        share, low, high = _won(study, rule)
        lines.append(
            f"The best rule with {work.value} device work is {rule.name}: "
            f"{percent(rates[rule.name, SIZE])}, {_whole(share)} % of the gap "
            f"({_whole(low)} to {_whole(high)} over the seeds)."
        )
    lines += _elsewhere(study, no_more)
    return "\n".join(f"- {line}" for line in lines) + "\n"


def _elsewhere(study: Study, rules: Iterable[Rule]) -> Iterable[str]:
    """Rules that would win enough on a stream that is not the calibrated one."""
    for rule in rules:
        won = [
            (stream.measured.won(rule.name, SIZE), stream.title)
            for stream in (*study.sweep, *study.others)
        ]
        (low, low_title), (high, high_title) = min(won), max(won)
        if high >= NEEDED:
            yield (
                f"It depends on the stream: {rule.name} wins {_whole(high)} % of the "
                f"gap on {high_title!r} and {_whole(low)} % on {low_title!r}. Picks "
                "recorded from a model would have to show which of them it is like."
            )


def _model(study: Study) -> str:
    model, shape = study.model, study.shape
    return (
        f"Top-k {shape.top_k:,} of {shape.context:,} rows and one more in each step; "
        f"{shape.steps:,} steps, the first {shape.warm_up:,} not counted; rates are "
        f"means over {len(study.by_seed)} streams, seeds from 0. A row's score is its "
        f"popularity (standard deviation {model.popularity:g}) + a drift "
        f"({model.drift:g}, which forgets in {model.drift_steps:g} steps) + noise "
        f"({model.noise:g}) + a bonus for the newest rows ({model.recency:g}, which "
        f"decays in {model.recency_rows} rows). One step's picks are in the buffer "
        "together, so at 1 x top-k all rules are equal, and miss what the last step "
        "did not pick.\n"
    )


_WORDS = """\
A hot buffer holds rows of one request on the device. A step *picks* the top-k rows that
the indexer scores highest. A pick that is in the buffer is a *hit*; else it is a
*miss*: it is fetched from the host, and some row that the step does not pick makes
room. A *rule* says which. The miss rate is misses by picks. The *gap* is the miss rate
of LRU, which the resolver has, less that of the optimum; a rule *wins* the part of it
by which it misses less than LRU. *Device work* is compared with that of LRU in the
kernel `assign`. *Overlap* is the share of a step's picks that the step before picked,
too. At a *pace* of p, scores move p times as far from step to step as on the calibrated
stream.
"""

_QUICK = """\
**A quick run, with few rows and steps: it shows that the study runs, and nothing about
the rules.**
"""

_NO_SCORES = """\
The resolver is handed positions. The logits that they were chosen by are a temporary
of the indexer's operator, and top-k does not return them. Scores of rows that were
*not* picked, which say which row to give up, exist nowhere else: a rule that looks at
them needs the logits kept until the resolver ran, a second input to `assign`, and one
scattered read for each slot not in use. That is more device work, whatever it saves.
"""

_OTHERS = """\
The first table changes how far all scores move from step to step; its pace 1 is the
calibrated stream (seed 0). The second changes the context's length, or the kind of
stream: with nothing but popularity, the rows that were fetched last are mostly strays;
with nothing but drift, they are the ones that will be picked. In parentheses: percent
of the gap won.
"""


def words() -> str:
    """What the report's words and the names of the rules mean."""
    rows = [[rule.name, rule.gives_up] for rule in (*ONLINE, OPTIMUM)]
    heads = ["rule", "which rows make room first"]
    return f"{_WORDS}\n{table(heads, rows)}"


def text(study: Study, command: str, about: str, charts: Sequence[str]) -> str:
    """The report.

    Args:
        study: What it is about.
        command: That printed it.
        about: Date, versions and the like.
        charts: File names of the charts beside it, if any.
    """
    size, overlap = (
        [f"![Miss rate by {key}]({name})\n" for name in charts if f"-{key}." in name]
        for key in ("size", "overlap")
    )
    parts = [
        "# Rules for hot buffers\n",
        f"```sh\n{command}\n```\n",
        "A simulation on synthetic streams. They are no model's picks, and no GPU took "
        f"part. {about}.\n",
        *([_QUICK] if study.is_quick else []),
        "## Words\n",
        words(),
        "## Verdict\n",
        verdict(study),
        "## Streams\n",
        _model(study),
        _calibration(study),
        "The published rates are those of GLM-5.1, top-k 2,048, on a LongBench-v2 "
        f"trace: {SOURCE}.\n",
        "## Miss rates\n",
        _rates(study),
        *size,
        f"## What rules win at {SIZE} x top-k, and what they need\n",
        _work(study),
        _NO_SCORES,
        _bytes(study),
        f"## Other overlaps and streams, at {SIZE} x top-k\n",
        _OTHERS,
        _streams(study.sweep),
        *overlap,
        _streams(study.others),
    ]
    return "\n".join(parts)


def _ticks(lowest: float, highest: float, step: float) -> list[float]:
    """Multiples of a step, the outer ones not inside of the values."""
    first, last = math.floor(lowest / step), math.ceil(highest / step)
    return [round(step * i, 6) for i in range(first, max(last, first + 1) + 1)]


def _axes(
    title: str, x_name: str, x_ticks: Sequence[float], lines: Sequence[plots.Line]
) -> plots.Axes:
    highest = max(y for line in lines for _, y in line.points)
    y_ticks = _ticks(0, highest, 5 if highest <= 40 else 10)
    return plots.Axes(title, x_name, "misses, % of picks", x_ticks, y_ticks)


def charts(study: Study) -> dict[str, str]:
    """The charts by name: miss rates by size, and by overlap."""
    names = (*_CHARTED, OPTIMUM.name)
    rates = study.mean.rates
    lines = [
        plots.Line(name, [(size, 100 * rates[name, size]) for size in SIZES])
        for name in names
    ]
    published = [(s, 100 * r) for (n, s), r in FITTED.items() if n == LRU.name]
    lines.append(plots.Line("LRU, published", published, is_joined=False))
    size_axes = _axes(
        "Miss rate by size of the hot buffer, calibrated stream",
        "hot buffer, in top-k",
        SIZES,
        lines,
    )
    by_overlap = sorted(study.sweep, key=lambda stream: stream.measured.overlap)
    sweep = [
        plots.Line(
            name,
            [
                (s.measured.overlap, 100 * s.measured.rates[name, SIZE])
                for s in by_overlap
            ],
        )
        for name in names
    ]
    overlaps = [stream.measured.overlap for stream in by_overlap]
    overlap_axes = _axes(
        f"Miss rate by overlap of the picks, hot buffer of {SIZE} x top-k",
        "share of a step's picks that the step before picked, too",
        _ticks(overlaps[0], overlaps[-1], 0.1),
        sweep,
    )
    return {
        "size": plots.draw(size_axes, lines),
        "overlap": plots.draw(overlap_axes, sweep),
    }
