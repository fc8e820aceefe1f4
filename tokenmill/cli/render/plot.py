"""A curve as lines of plain characters, for a terminal as for a pipe. Knows nothing of what is drawn."""

from __future__ import annotations

from collections.abc import Sequence

_WIDTH, _HEIGHT = 64, 8


def plot(series: Sequence[tuple[str, Sequence[tuple[float, float]]]], x_label: str) -> list[str]:
    """`series`: (mark of one character, points); later ones are drawn over earlier ones."""
    points = [point for _, each in series for point in each]
    if not points:
        return []
    xs, ys = [x for x, _ in points], [y for _, y in points]
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)
    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for mark, each in series:
        for x, y in each:
            column = round((x - left) / ((right - left) or 1) * (_WIDTH - 1))
            row = round((high - y) / ((high - low) or 1) * (_HEIGHT - 1))
            grid[row][column] = mark
    labels = {0: f"{high:.3f}", _HEIGHT - 1: f"{low:.3f}"}
    wide = max(map(len, labels.values()))
    lines = [f"{labels.get(number, ''):>{wide}} |{''.join(row).rstrip()}" for number, row in enumerate(grid)]
    ends = f"{left:g}"
    axis = f"{' ' * wide} +{'-' * _WIDTH}"
    return [*lines, axis, f"{' ' * wide}  {ends}{f'{x_label} {right:g}':>{_WIDTH - len(ends)}}"]
