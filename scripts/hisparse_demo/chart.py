# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The picture of the demo: pages by residency, and requests, over time, as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .measure import Sample

_WIDTH, _LEFT, _RIGHT = 900, 64, 16
_PAGES_HEIGHT, _REQUESTS_HEIGHT = 150, 50
_TITLE, _GAP, _AXIS = 26, 14, 30
_RUN_HEIGHT = _TITLE + _PAGES_HEIGHT + _GAP + _REQUESTS_HEIGHT + _AXIS
_LEGEND = 64
_MOST_TICKS = 10
_STYLE = (
    "text{font:12px sans-serif;fill:#222}.title{font-size:14px;font-weight:bold}"
    ".end{text-anchor:end}.middle{text-anchor:middle}"
    ".frame{fill:none;stroke:#999}.limit{stroke:#222;stroke-dasharray:6 4}"
    ".device{fill:#e08214}.both{fill:#4d9221}.host{fill:#7b6fb5}"
    ".running{fill:#5a7ca8}.waiting{fill:#d4d4d4}.preempted{fill:#c00000}"
)
# From the bottom of the stack to its top.
_PAGES = {
    "device": "on the device only",
    "both": "on the device and on the host",
    "host": "on the host only (latents)",
}
_REQUESTS = {"running": "requests running", "waiting": "requests waiting"}


@dataclass(frozen=True)
class Run:
    """One server's part of the picture.

    Attributes:
        title: What it is.
        samples: By time.
        capacity: Pages that the device holds.
    """

    title: str
    samples: Sequence[Sample]
    capacity: float


@dataclass(frozen=True)
class _Panel:
    """A rectangle with scales: seconds to the right, amounts upwards from 0."""

    top: float
    height: float
    seconds: float
    most: float

    def x(self, seconds: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * seconds / self.seconds

    def y(self, amount: float) -> float:
        return self.top + self.height * (1 - amount / self.most)

    def frame(self, unit: str) -> Iterable[str]:
        width = _WIDTH - _LEFT - _RIGHT
        yield (
            f'<rect class="frame" x="{_LEFT}" y="{self.top}" width="{width}" '
            f'height="{self.height}"/>'
        )
        middle = self.top + self.height / 2
        yield (
            f'<text class="middle" transform="translate(14 {middle:.0f}) '
            f'rotate(-90)">{unit}</text>'
        )
        for amount in (0, self.most):
            y = self.y(amount) + 4
            yield f'<text class="end" x="{_LEFT - 6}" y="{y:.1f}">{amount:.0f}</text>'

    def stack(self, samples: Sequence[Sample], names: Iterable[str]) -> Iterable[str]:
        """Areas on top of each other; a value holds until the next sample."""
        base = [0] * len(samples)
        for name in names:
            top = [b + getattr(s, name) for b, s in zip(base, samples)]
            points = [*self._steps(samples, top), *self._steps(samples, base)[::-1]]
            text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            yield f'<polygon class="{name}" points="{text}"/>'
            base = top

    def _steps(
        self, samples: Sequence[Sample], amounts: Sequence[float]
    ) -> list[tuple[float, float]]:
        points = [(self.x(samples[0].seconds), self.y(amounts[0]))]
        for sample, before, amount in zip(samples[1:], amounts, amounts[1:]):
            if amount != before:
                x = self.x(sample.seconds)
                points += [(x, self.y(before)), (x, self.y(amount))]
        return [*points, (self.x(samples[-1].seconds), self.y(amounts[-1]))]

    def limit(self, amount: float, text: str) -> Iterable[str]:
        y = self.y(amount)
        left, right = _LEFT, _WIDTH - _RIGHT
        yield f'<path class="limit" d="M{left} {y:.1f}H{right}"/>'
        yield f'<text class="end" x="{right - 4}" y="{y - 4:.1f}">{text}</text>'

    def seconds_axis(self) -> Iterable[str]:
        step = _tick_step(self.seconds)
        y = self.top + self.height + 16
        for number in range(int(self.seconds / step) + 1):
            x = self.x(number * step)
            yield f'<text class="middle" x="{x:.1f}" y="{y}">{number * step} s</text>'

    def preemptions(self, samples: Sequence[Sample]) -> Iterable[str]:
        """A mark where the counter has grown since the last sample."""
        before = 0
        for sample in samples:
            if sample.preemptions > before:
                yield _mark(self.x(sample.seconds), self.top)
            before = sample.preemptions


def _mark(x: float, y: float) -> str:
    return f'<path class="preempted" d="M{x - 5:.1f} {y - 9}h10l-5 9z"/>'


def _tick_step(seconds: float) -> int:
    """The smallest round number of seconds that makes few ticks."""
    scale = 1
    while True:
        for step in (scale, 2 * scale, 5 * scale):
            if seconds / step <= _MOST_TICKS:
                return step
        scale *= 10


def _most(samples: Iterable[Sample], names: Iterable[str]) -> int:
    names = tuple(names)
    return max((sum(getattr(s, n) for n in names) for s in samples), default=0)


def _one_run(
    run: Run, top: float, seconds: float, pages: float, requests: float
) -> Iterable[str]:
    upper = _Panel(top + _TITLE, _PAGES_HEIGHT, seconds, pages)
    lower_top = upper.top + _PAGES_HEIGHT + _GAP
    lower = _Panel(lower_top, _REQUESTS_HEIGHT, seconds, requests)
    yield f'<text class="title" x="{_LEFT}" y="{top + 17}">{run.title}</text>'
    yield from upper.stack(run.samples, _PAGES)
    yield from upper.frame("pages")
    yield from upper.limit(run.capacity, f"the device holds {run.capacity:.0f}")
    yield from lower.stack(run.samples, _REQUESTS)
    yield from lower.frame("requests")
    yield from lower.preemptions(run.samples)
    yield from lower.seconds_axis()


def _legend(top: float) -> Iterable[str]:
    for row, entries in enumerate((_PAGES, _REQUESTS)):
        y, x = top + 10 + 22 * row, _LEFT
        for name, text in entries.items():
            yield f'<rect class="{name}" x="{x}" y="{y}" width="12" height="12"/>'
            yield f'<text x="{x + 18}" y="{y + 11}">{text}</text>'
            x += 240
    yield _mark(x + 6, y + 11)
    yield f'<text x="{x + 18}" y="{y + 11}">a preemption</text>'


def draw(runs: Sequence[Run]) -> str:
    """Return the picture: the runs under each other, on the same scales.

    Args:
        runs: At least one, each with at least one sample.
    """
    samples = [sample for run in runs for sample in run.samples]
    seconds = max(1.0, *(sample.seconds for sample in samples))
    pages = max(_most(samples, _PAGES), *(run.capacity for run in runs))
    # To the next ten, so that the highest line is not the frame.
    pages = 10 * (pages // 10 + 1)
    requests = max(1, _most(samples, _REQUESTS))
    height = len(runs) * _RUN_HEIGHT + _LEGEND
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for number, run in enumerate(runs):
        top = number * _RUN_HEIGHT
        lines += _one_run(run, top, seconds, pages, requests)
    return "\n".join([*lines, *_legend(len(runs) * _RUN_HEIGHT), "</svg>", ""])
