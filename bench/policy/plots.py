# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""A line chart as SVG."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 220, 40, 50
_STYLE = (
    "text{font:12px sans-serif;fill:#222}.title{font-size:14px;font-weight:bold}"
    ".end{text-anchor:end}.middle{text-anchor:middle}.grid{stroke:#ddd}"
    ".line{fill:none;stroke-width:2}"
)
_COLOURS = (
    "#e08214",
    "#8c6d31",
    "#222222",
    "#5a7ca8",
    "#7b6fb5",
    "#c00000",
    "#4d9221",
    "#d6409f",
)


@dataclass(frozen=True)
class Line:
    """A line, or points without one.

    Attributes:
        name: For the legend.
        points: x and y, by x.
        is_joined: Whether the points are joined.
    """

    name: str
    points: Sequence[tuple[float, float]]
    is_joined: bool = True


@dataclass(frozen=True)
class Axes:
    """What is drawn over what.

    Attributes:
        title: Of the chart.
        x_name: Below the x axis.
        y_name: Beside the y axis, which begins at 0.
        x_ticks: Where the x axis has numbers; it ends at the outer ones.
        y_ticks: The same for the y axis.
    """

    title: str
    x_name: str
    y_name: str
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]

    def x(self, value: float) -> float:
        """Where a value lies, in pixels from the left."""
        low, high = self.x_ticks[0], self.x_ticks[-1]
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (value - low) / (high - low)

    def y(self, value: float) -> float:
        """Where a value lies, in pixels from the top."""
        low, high = self.y_ticks[0], self.y_ticks[-1]
        height = _HEIGHT - _TOP - _BOTTOM
        return _TOP + height * (1 - (value - low) / (high - low))


def _frame(axes: Axes) -> Iterable[str]:
    left, right = _LEFT, _WIDTH - _RIGHT
    bottom = _HEIGHT - _BOTTOM
    yield f'<text class="title" x="{left}" y="22">{escape(axes.title)}</text>'
    for value in axes.y_ticks:
        y = axes.y(value)
        yield f'<path class="grid" d="M{left} {y:.1f}H{right}"/>'
        yield f'<text class="end" x="{left - 6}" y="{y + 4:.1f}">{value:g}</text>'
    for value in axes.x_ticks:
        x = axes.x(value)
        yield f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}"/>'
        yield f'<text class="middle" x="{x:.1f}" y="{bottom + 16}">{value:g}</text>'
    middle = (left + right) / 2
    yield (
        f'<text class="middle" x="{middle:.0f}" y="{bottom + 38}">'
        f"{escape(axes.x_name)}</text>"
    )
    middle = (_TOP + bottom) / 2
    yield (
        f'<text class="middle" transform="translate(16 {middle:.0f}) rotate(-90)">'
        f"{escape(axes.y_name)}</text>"
    )


def _line(axes: Axes, line: Line, number: int) -> Iterable[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    places = [(axes.x(x), axes.y(y)) for x, y in line.points]
    if line.is_joined:
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline class="line" stroke="{colour}" points="{text}"/>'
        mark = f'r="3" fill="{colour}"'
    else:
        mark = f'r="6" fill="none" stroke="{colour}" stroke-width="2"'
    x, y = _WIDTH - _RIGHT + 20, _TOP + 12 + 20 * number
    for place_x, place_y in [*places, (x, y - 4)]:
        yield f'<circle cx="{place_x:.1f}" cy="{place_y:.1f}" {mark}/>'
    yield f'<text x="{x + 12}" y="{y}">{escape(line.name)}</text>'


def draw(axes: Axes, lines: Sequence[Line]) -> str:
    """Return the chart, with a legend in the order of the lines."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        *_frame(axes),
    ]
    for number, line in enumerate(lines):
        parts += _line(axes, line, number)
    return "\n".join([*parts, "</svg>", ""])
