"""The frame of an SVG chart: axes with ticks, and marks placed by value. Text only; colours are CSS variables.

Owns the mapping from values to pixels and the few shapes that charts are made of. Knows neither HTML pages nor what the
figures mean. Called by charts.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 44
_LOG_STEPS: tuple[tuple[float, ...], ...] = ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5))
_LABEL_HEIGHT = 15
_TICK_SPACING = 36  # pixels that an x label takes at least


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    low: float
    high: float
    logarithmic: bool = False
    percent: bool = False  # values are shares
    whole: bool = False  # values are counts

    def share(self, value: float) -> float:
        """Position within the range, 0 to 1, clipped."""
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = math.log10(max(value, 1e-12)), math.log10(low), math.log10(high)
        return min(1.0, max(0.0, (value - low) / ((high - low) or 1.0)))

    def ticks(self) -> list[float]:
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            span = self.high / self.low
            steps = _LOG_STEPS[0] if span < 4 else _LOG_STEPS[1] if span < 12 else _LOG_STEPS[2] if span < 300 else (1,)
            return [f * 10.0**d for d in decades for f in steps if self.low <= f * 10.0**d <= self.high * 1.0001]
        step = max(float(self.whole), nice_step((self.high - self.low) / 5))
        first = math.ceil(self.low / step - 1e-9)
        return [step * n for n in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def text(self, value: float) -> str:
        return f"{100 * value:.4g}%" if self.percent else short(value)


@dataclass(slots=True)
class Canvas:
    x: Axis
    y: Axis
    width: int = WIDTH
    height: int = HEIGHT
    parts: list[str] = field(default_factory=list)
    label_rows: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))  # taken: right end, left end

    def place(self, x: float, y: float) -> tuple[float, float]:
        across = LEFT + self.x.share(x) * (self.width - LEFT - RIGHT)
        down = self.height - BOTTOM - self.y.share(y) * (self.height - TOP - BOTTOM)
        return round(across, 1), round(down, 1)

    def frame(self) -> None:
        right, bottom = self.width - RIGHT, self.height - BOTTOM
        for tick in self.y.ticks():
            _, down = self.place(self.x.low, tick)
            self.parts.append(f'<line class="grid-line" x1="{LEFT}" x2="{right}" y1="{down}" y2="{down}"/>')
            self.parts.append(f'<text x="{LEFT - 8}" y="{down + 4}" text-anchor="end">{self.y.text(tick)}</text>')
        last = -math.inf
        for tick in self.x.ticks():
            across, _ = self.place(tick, self.y.low)
            if across - last >= _TICK_SPACING:  # logarithmic ticks crowd at the end of a decade
                last = across
                text = self.x.text(tick)
                self.parts.append(f'<text x="{across}" y="{bottom + 18}" text-anchor="middle">{text}</text>')
        self.parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        middle, centre = (LEFT + right) / 2, (TOP + bottom) / 2
        self.parts.append(
            f'<text x="{middle}" y="{self.height - 6}" text-anchor="middle">{escape(self.x.label)}</text>'
        )
        self.parts.append(
            f'<text transform="translate(14 {centre}) rotate(-90)" text-anchor="middle">{escape(self.y.label)}</text>'
        )

    def line(self, kind: str, start: tuple[float, float], end: tuple[float, float]) -> None:
        """A straight line of CSS class `kind` between two points in values."""
        (x1, y1), (x2, y2) = self.place(*start), self.place(*end)
        self.parts.append(f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>')

    def path(self, kind: str, points: Sequence[tuple[float, float]], stroke: str = "") -> None:
        color = f' stroke="{stroke}"' if stroke else ""
        self.parts.append(f'<polyline class="{kind}"{color} points="{self.outline(points)}"/>')

    def outline(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{x},{y}" for x, y in (self.place(*point) for point in points))

    def limit(self, value: float, label: str) -> None:
        """A dashed horizontal line with its name at the right end, or the left where the right is taken."""
        right = self.width - RIGHT
        _, down = self.place(self.x.low, value)
        self.parts.append(f'<line class="limit" x1="{LEFT}" x2="{right}" y1="{down}" y2="{down}"/>')
        for taken, across, anchor in zip(self.label_rows, (right - 4, LEFT + 6), ("end", "start"), strict=True):
            for at in (down - 5, down + 13):
                if all(abs(at - other) >= _LABEL_HEIGHT for other in taken):
                    taken.append(at)
                    text = f'<text class="strong" x="{across}" y="{at}" text-anchor="{anchor}">{escape(label)}</text>'
                    self.parts.append(text)
                    return

    def svg(self, name: str, label: str) -> str:
        return svg(name, label, self.width, self.height, self.parts)


def svg(name: str, label: str, width: float, height: float, parts: Sequence[str]) -> str:
    """`name` is for tests and style sheets, `label` for screen readers."""
    return (
        f'<svg class="chart" data-chart="{name}" role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 {width} {height}">{"".join(parts)}</svg>'
    )


def nice_step(rough: float) -> float:
    """The next of 1, 2, 5 x 10^n."""
    power = 10.0 ** math.floor(math.log10(max(rough, 1e-12)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def short(value: float) -> str:
    """12000 -> 12k."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{suffix}"
    return f"{round(value, 6):g}"
