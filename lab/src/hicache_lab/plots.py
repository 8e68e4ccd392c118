"""Figures as inline SVG: lines, stacked areas and bars, without a plotting library.

Each function returns one `<svg>` element. Colours are CSS classes (`c0`, `c1`, ...) that the page defines for light and
dark; all text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 280
LEFT, RIGHT, TOP, BOTTOM = 84, 16, 12, 46
# The height of a row of text above a figure; phones show larger letters.
MARK_HEIGHT = 20
# With room for the larger letters of phones.
BAR_HEIGHT, BAR_LABEL_WIDTH, BAR_VALUE_WIDTH = 26, 250, 150


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over the x axis of a figure. `colour` is the number of a CSS class; `dashed` marks a second kind of
    line."""

    name: str
    values: Sequence[float]
    colour: int
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of a figure, with a label above the figure."""

    x: float
    y: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """The mapping from data to pixels. `ticks` are pairs of value and label. `log` means a logarithmic scale, with
    `low` > 0."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    label: str
    log: bool = False

    def position(self, value: float, start: float, length: float) -> float:
        """Return the position of a value on an axis of `length` pixels. Values outside the axis are drawn at its
        ends."""
        scale: Callable[[float], float] = math.log if self.log else float
        low, high = scale(self.low), scale(self.high)
        at = (scale(min(max(value, self.low), self.high)) - low) / (high - low) if high > low else 0.0
        return start + at * length


def linear_axis(high: float, label: str, form: Callable[[float], str]) -> Axis:
    """Return an axis from 0 to `high` with about five round ticks."""
    high = high if high > 0 else 1.0
    rough = high / 5
    magnitude: float = 10 ** math.floor(math.log10(rough))
    step = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor >= rough * 0.999)
    return Axis(0.0, high, [(i * step, form(i * step)) for i in range(math.floor(high / step) + 1)], label)


def log_axis(low: float, high: float, label: str, form: Callable[[float], str]) -> Axis:
    """Return an axis from a power of ten at or below `low` to one at or above `high`."""
    low = low if low > 0 else 1e-3
    first = math.floor(math.log10(low))
    last = max(first + 1, math.ceil(math.log10(max(high, low))))
    powers: list[float] = [10.0**power for power in range(first, last + 1)]
    return Axis(powers[0], powers[-1], [(power, form(power)) for power in powers], label, log=True)


def lines(
    x: Axis, y: Axis, positions: Sequence[float], curves: Sequence[Curve], *, title: str, marks: Sequence[Mark] = ()
) -> str:
    """Draw curves over common positions. Each mark has its own row above the figure, so labels do not overlap."""
    body = []
    for curve in curves:
        path = " ".join(f"{_x(x, at):.1f},{_y(y, value):.1f}"
                        for at, value in zip(positions, curve.values, strict=True))
        dash = ' stroke-dasharray="5 4"' if curve.dashed else ""
        body.append(f'<polyline class="line c{curve.colour}" points="{path}"{dash}><title>{escape(curve.name)}</title>'
                    "</polyline>")
    return _figure(x, y, [*body, *_marks(x, y, marks)], title, above=MARK_HEIGHT * len(marks))


def _marks(x: Axis, y: Axis, marks: Sequence[Mark]) -> list[str]:
    """Return circles, vertical lines and labels. Labels extend towards the middle of the figure. The outer marks have
    the upper rows, so that their lines do not cross the labels of the others."""
    middle = (LEFT + WIDTH - RIGHT) / 2
    placed = sorted(((_x(x, mark.x), mark) for mark in marks), key=lambda each: -abs(each[0] - middle))
    shapes, labels = [], []
    for row, (at, mark) in enumerate(placed):
        top = -MARK_HEIGHT * (len(placed) - 1 - row)
        offset, anchor = (-6, "end") if at > middle else (6, "start")
        shapes.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{top - 12}" y2="{HEIGHT - BOTTOM}"/>')
        shapes.append(f'<circle class="mark" cx="{at:.1f}" cy="{_y(y, mark.y):.1f}" r="4"/>')
        labels.append(f'<text class="value mark" x="{at + offset:.1f}" y="{top}" text-anchor="{anchor}">'
                      f"{escape(mark.label)}</text>")
    return [*shapes, *labels]


def stacked(x: Axis, y: Axis, positions: Sequence[float], curves: Sequence[Curve], *, title: str) -> str:
    """Draw areas on top of each other, the first one at the bottom."""
    body = []
    floor = [0.0] * len(positions)
    for curve in curves:
        ceiling = [low + value for low, value in zip(floor, curve.values, strict=True)]
        outline = [(at, value) for at, value in zip(positions, ceiling, strict=True)]
        outline += [(at, value) for at, value in zip(reversed(positions), reversed(floor), strict=True)]
        path = " ".join(f"{_x(x, at):.1f},{_y(y, value):.1f}" for at, value in outline)
        body.append(
            f'<polygon class="area c{curve.colour}" points="{path}"><title>{escape(curve.name)}</title></polygon>'
        )
        floor = ceiling
    return _figure(x, y, body, title)


def bars(rows: Sequence[tuple[str, float, str]], *, colour: int, title: str) -> str:
    """Draw horizontal bars from rows of label, length, and the value as text."""
    height = BAR_HEIGHT * len(rows) + 8
    room = WIDTH - BAR_LABEL_WIDTH - BAR_VALUE_WIDTH
    longest = max((value for _, value, _ in rows), default=0.0) or 1.0
    body = []
    for row, (label, value, text) in enumerate(rows):
        top = 4 + row * BAR_HEIGHT
        width = max(1.0, room * value / longest)
        middle = top + BAR_HEIGHT / 2 + 4
        body.append(f'<text x="{BAR_LABEL_WIDTH - 10}" y="{middle:.1f}" text-anchor="end">{escape(label)}</text>')
        body.append(f'<rect class="area c{colour}" x="{BAR_LABEL_WIDTH}" y="{top + 4}" width="{width:.1f}" '
                    f'height="{BAR_HEIGHT - 8}" rx="2"/>')
        body.append(f'<text class="value" x="{BAR_LABEL_WIDTH + width + 8:.1f}" y="{middle:.1f}">{escape(text)}</text>')
    return _svg(height, body, title)


def legend(curves: Sequence[Curve]) -> str:
    """Return the legend of a figure, as HTML."""
    items = []
    for curve in curves:
        kind = "dashed" if curve.dashed else ""
        items.append(f'<span class="key"><i class="swatch c{curve.colour} {kind}"></i>{escape(curve.name)}</span>')
    return f'<div class="legend">{"".join(items)}</div>'


def _x(axis: Axis, value: float) -> float:
    return axis.position(value, LEFT, WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return axis.position(value, HEIGHT - BOTTOM, TOP + BOTTOM - HEIGHT)


def _figure(x: Axis, y: Axis, body: Sequence[str], title: str, above: int = 0) -> str:
    grid, labels = [], []
    for value, text in y.ticks:
        at = _y(y, value)
        grid.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        labels.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for value, text in x.ticks:
        at = _x(x, value)
        grid.append(
            f'<line class="tick" x1="{at:.1f}" x2="{at:.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 4}"/>'
        )
        labels.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{escape(text)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    labels.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x.label)}</text>')
    labels.append(f'<text class="axis" transform="translate(13 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
                  f'text-anchor="middle">{escape(y.label)}</text>')
    return _svg(HEIGHT, [*grid, *body, *labels], title, above)


def _svg(height: float, body: Sequence[str], title: str, above: int = 0) -> str:
    return (f'<svg viewBox="0 {-above} {WIDTH} {height + above:.0f}" role="img" '
            f'aria-label="{escape(title, quote=True)}">{"".join(body)}</svg>')
