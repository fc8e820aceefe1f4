"""Charts as SVG text: curves with intervals, scatter, one stacked bar, a list of bars. No library, no script.

Callers bring numbers and labels; report.css brings light and dark. Every chart has an `aria-label`, points and bars
have a tooltip (`<title>`). Called by the reports of plan, simulate, optimize and bench.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tokenmill.report.canvas import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Axis, Canvas, svg

_MAX_JOINED = 12  # a front of more points has too many steps in its third axis to be a line
_NEAR = 30.0  # pixels within which points share a label
_PADDING = 0.08  # of a linear axis on either side of the points
_BAR_HEIGHT, _BAR_LABELS = 18, 250
_CHARACTER, _BESIDE = 7.0, 11.0  # width of a bold letter; distance of a label from its point


@dataclass(frozen=True, slots=True)
class Curve:
    """`color`: number of a palette variable. With `low` and `high` an interval is drawn behind the line."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int = 0
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    color: str  # a CSS colour
    title: str
    mark: str = ""  # a short text beside it
    dim: bool = False
    ring: bool = False
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    color: int = 0
    text: str = ""  # at its end, for `bars`


def curves(
    name: str,
    label: str,
    lines: Sequence[Curve],
    x_label: str,
    y_label: str,
    *,
    logarithmic: tuple[bool, bool] = (False, False),
    limits: Sequence[tuple[float, str]] = (),
    top: float = 0.0,
    counts: bool = False,
    width: int = WIDTH,
) -> str:
    """Lines over one pair of axes, with intervals and horizontal limits. `top`: at least this high; `counts`: whole
    numbers on the y axis."""
    xs = [x for line in lines for x in line.xs]
    values = [y for line in lines for y in (*line.ys, *line.high)] + [value for value, _ in limits] + [top]
    lows = [y for line in lines for y in (*line.ys, *line.low)] + [value for value, _ in limits]
    x_axis = Axis(x_label, min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, logarithmic[0])
    low = min(max(1e-9, value) for value in lows) * 0.8 if logarithmic[1] else 0.0
    canvas = Canvas(x_axis, Axis(y_label, low, max(values) * 1.1 or 1.0, logarithmic[1], whole=counts), width)
    canvas.frame()
    for line in lines:
        _draw_curve(canvas, line)
    for value, text in limits:
        canvas.limit(value, text)
    key = legend([(f"var(--c{line.color})", line.label) for line in lines]) if len(lines) > 1 else ""
    return canvas.svg(name, label) + key


def _draw_curve(canvas: Canvas, curve: Curve) -> None:
    color = f"var(--c{curve.color})"
    if curve.low and curve.high:
        upper, lower = zip(curve.xs, curve.high, strict=True), zip(curve.xs, curve.low, strict=True)
        outline = canvas.outline([*upper, *reversed(list(lower))])
        canvas.parts.append(f'<polygon class="band" fill="{color}" points="{outline}"/>')
    canvas.path("curve", list(zip(curve.xs, curve.ys, strict=True)), color)


def scatter(
    name: str,
    label: str,
    points: Sequence[Point],
    x_label: str,
    y_label: str,
    *,
    logarithmic: bool = False,
    percent: tuple[bool, bool] = (False, False),
    limits: Sequence[tuple[float, str]] = (),
    diagonal: bool = False,
    front: Sequence[tuple[float, float]] = (),
    width: int = WIDTH,
) -> str:
    """Points with error bars and labels. `percent`: the values of x and of y are shares; `front` is joined by a line,
    `diagonal` shows where x equals y."""
    xs = [value for point in points for value in (point.x, *(point.x_range or ()))]
    ys = [value for point in points for value in (point.y, *(point.y_range or ()))] + [value for value, _ in limits]
    if diagonal:
        xs = ys = [*xs, *ys, 0.0]
    x_axis = Axis(x_label, *_padded(xs, logarithmic), logarithmic, percent[0])
    canvas = Canvas(x_axis, Axis(y_label, *_padded(ys, logarithmic), logarithmic, percent[1]), width)
    canvas.frame()
    if diagonal:
        low, high = canvas.x.low, canvas.x.high
        canvas.line("limit", (low, low), (high, high))
    if 1 < len(front) <= _MAX_JOINED:
        canvas.path("front", sorted(front))
    for point in sorted(points, key=lambda each: not each.dim):  # the front is drawn over the rest
        _draw_point(canvas, point)
    for value, text in limits:
        canvas.limit(value, text)
    taken: list[tuple[float, float, float]] = []
    for place, mark in _shared_marks(canvas, points):
        _draw_mark(canvas, place, mark, taken)
    return canvas.svg(name, label)


def _draw_point(canvas: Canvas, point: Point) -> None:
    x, y = canvas.place(point.x, point.y)
    if point.x_range:
        canvas.line("error", (point.x_range[0], point.y), (point.x_range[1], point.y))
    if point.y_range:
        canvas.line("error", (point.x, point.y_range[0]), (point.x, point.y_range[1]))
    dim = ' class="dim"' if point.dim else ""
    shape = f'<circle{dim} cx="{x}" cy="{y}" r="{4 if point.dim else 6.5}" fill="{point.color}">'
    canvas.parts.append(f"{shape}<title>{escape(point.title)}</title></circle>")
    if point.ring:
        canvas.parts.append(f'<circle class="ring" cx="{x}" cy="{y}" r="10"/>')


def _draw_mark(canvas: Canvas, place: tuple[float, float], mark: str, taken: list[tuple[float, float, float]]) -> None:
    """A text beside a point: right of it, else left, above, else below; left out where it would cover another one (the
    point has a tooltip). `taken`: (left, right, y) of the texts so far."""
    x, y = place
    length = _CHARACTER * len(mark)
    for at in (y - 8, y + 17):
        for left, anchor in ((x + _BESIDE, "start"), (x - _BESIDE - length, "end")):
            right = left + length
            inside = left >= LEFT and right <= canvas.width - RIGHT and TOP <= at <= canvas.height - BOTTOM
            if inside and not any(left < b and a < right and abs(at - other) < 13 for a, b, other in taken):
                taken.append((left, right, at))
                across = left if anchor == "start" else right
                text = f'<text class="mark" x="{across:.1f}" y="{at:.1f}" text-anchor="{anchor}">{escape(mark)}</text>'
                canvas.parts.append(text)
                return


def _padded(values: Sequence[float], logarithmic: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if logarithmic:
        return low / 1.25, high * 1.25
    spare = _PADDING * (high - low) or max(0.01, 0.1 * abs(high))
    return low - spare, high + spare


def _shared_marks(canvas: Canvas, points: Sequence[Point]) -> list[tuple[tuple[float, float], str]]:
    """Marks by place; points that lie on each other share a text, many of them only the first mark and a count."""
    found: list[tuple[tuple[float, float], list[str]]] = []
    for point in points:
        if point.mark:
            place = canvas.place(point.x, point.y)
            near = next((marks for other, marks in found if math.dist(other, place) < _NEAR), None)
            if near is None:
                found.append((place, [point.mark]))
            else:
                near.append(point.mark)
    return [(at, ", ".join(marks) if len(marks) < 3 else f"{marks[0]} +{len(marks) - 1}") for at, marks in found]


def stacked_bar(name: str, label: str, parts: Sequence[Bar], total: float, unit: str, note: str) -> str:
    """One bar whose parts add up to at most `total`; what is left shows the ground. Labels inside where they fit."""
    width, height, gap = 1060, 62, 3.0
    drawn, at = [f'<rect x="0" y="4" width="{width}" height="40" rx="8" fill="var(--grid)"/>'], 0.0
    for bar in parts:
        length = max(0.0, bar.value) / total * width
        if length > 0.5:
            inner = max(1.0, length - gap)
            title = f"<title>{escape(bar.label)}: {bar.value:.2f} {unit}</title>"
            shape = f'<rect x="{at:.1f}" y="4" width="{inner:.1f}" height="40" rx="6" fill="var(--c{bar.color})">'
            drawn.append(f"{shape}{title}</rect>")
            text = f"{bar.label} {bar.value:.1f}"
            if length > 8 * len(text) + 20:
                drawn.append(f'<text class="onbar" x="{at + 12:.1f}" y="29">{escape(text)}</text>')
        at += length
    drawn.append(f'<text x="{width}" y="60" text-anchor="end">{escape(note)}</text>')
    key = legend([(f"var(--c{bar.color})", f"{bar.label} {bar.value:.2f} {unit}") for bar in parts])
    return svg(name, label, width, height, drawn) + key


def bars(name: str, label: str, rows: Sequence[Bar], width: int = 2 * WIDTH) -> str:
    """Horizontal bars, one below the other, with a text at the end of each."""
    most = max((row.value for row in rows), default=0.0) or 1.0
    drawn = []
    for number, row in enumerate(rows):
        y, length = 4 + number * _BAR_HEIGHT, row.value / most * (width - _BAR_LABELS - 2 * LEFT)
        drawn.append(f'<text x="{_BAR_LABELS - 8}" y="{y + 11}" text-anchor="end">{escape(row.label)}</text>')
        drawn.append(
            f'<rect x="{_BAR_LABELS}" y="{y}" width="{max(1.0, length):.1f}" height="{_BAR_HEIGHT - 5}" rx="3" '
            f'fill="var(--c{row.color})"><title>{escape(row.label)}: {escape(row.text)}</title></rect>'
        )
        drawn.append(f'<text x="{_BAR_LABELS + length + 8:.1f}" y="{y + 11}">{escape(row.text)}</text>')
    return svg(name, label, width, 8 + _BAR_HEIGHT * len(rows), drawn)


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """(CSS colour, text)."""
    shown = (f'<span><i style="background:{color}"></i>{escape(text)}</span>' for color, text in entries)
    return f'<div class="legend">{"".join(shown)}</div>'
