"""A byte budget given out: one choice (a width, a type) for each name, with the least sum of errors that fits.

The arithmetic of mixed precision: knows names, errors and sizes only. Used by mixed.py and mixed_gguf.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from tokenmill.errors import UserError

Choice = TypeVar("Choice", int, str)
_HALVINGS = 40


def allocate_within(
    errors: Mapping[str, Mapping[Choice, float]], sizes: Mapping[str, Mapping[Choice, int]], limit: float
) -> dict[str, Choice]:
    """The choice of the fewest bytes whose errors sum to at most `limit`; the one of least error where none does."""
    low = sum(min(size.values()) for size in sizes.values())
    high = sum(max(size.values()) for size in sizes.values())
    best = allocate(errors, sizes, high)
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        chosen = allocate(errors, sizes, middle)
        if sum(errors[name][each] for name, each in chosen.items()) <= limit:
            best, high = chosen, middle
        else:
            low = middle + 1
        if low >= high:
            break
    return best


def allocate(
    sensitivities: Mapping[str, Mapping[Choice, float]], sizes: Mapping[str, Mapping[Choice, int]], budget: int
) -> dict[str, Choice]:
    """A width for each name with the least sum of sensitivities among those whose sizes fit into `budget`.

    Widths are raised in the order of error removed per byte along each name's lower convex hull, which is the exact
    optimum of the relaxed problem; what is left over is then spent on any single raise that still fits.
    """
    hulls = {name: _hull(sensitivities[name], sizes[name]) for name in sensitivities}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    left = budget - sum(sizes[name][width] for name, width in chosen.items())
    if left < 0:
        raise UserError(
            f"the budget of {budget:,} bytes is below the {budget - left:,} bytes of the narrowest widths",
            f"give at least {budget - left:,} bytes",
        )
    queue = [raised for name, hull in hulls.items() for raised in _raises(name, hull, sensitivities, sizes)]
    heapq.heapify(queue)
    stuck: set[str] = set()
    while queue:
        _, name, width = heapq.heappop(queue)
        cost = sizes[name][width] - sizes[name][chosen[name]]
        if name in stuck or cost > left:
            stuck.add(name)  # the next raise of this name costs even more
            continue
        chosen[name] = width
        left -= cost
    return _spend(chosen, sensitivities, sizes, left)


def _hull(errors: Mapping[Choice, float], sizes: Mapping[Choice, int]) -> list[Choice]:
    """Widths on the lower convex hull of error over size, from the smallest: each raise removes less per byte."""
    hull: list[Choice] = []
    for width in sorted(sizes, key=lambda width: (sizes[width], errors[width])):
        if hull and errors[width] >= errors[hull[-1]]:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1], errors, sizes) <= _slope(hull[-2], width, errors, sizes):
            hull.pop()
        hull.append(width)
    return hull


def _slope(width: Choice, wider: Choice, errors: Mapping[Choice, float], sizes: Mapping[Choice, int]) -> float:
    """Error removed per byte."""
    return (errors[width] - errors[wider]) / max(1, sizes[wider] - sizes[width])


def _raises(
    name: str,
    hull: Sequence[Choice],
    errors: Mapping[str, Mapping[Choice, float]],
    sizes: Mapping[str, Mapping[Choice, int]],
) -> list[tuple[float, str, Choice]]:
    return [(-_slope(width, wider, errors[name], sizes[name]), name, wider) for width, wider in pairwise(hull)]


def _spend(
    chosen: dict[str, Choice],
    errors: Mapping[str, Mapping[Choice, float]],
    sizes: Mapping[str, Mapping[Choice, int]],
    left: int,
) -> dict[str, Choice]:
    """Take the raise that removes the most error and fits, until none fits."""
    while True:
        fitting = [
            (errors[name][width] - errors[name][wider], name, wider)
            for name, width in chosen.items()
            for wider in sizes[name]
            if sizes[name][wider] - sizes[name][width] <= left and errors[name][wider] < errors[name][width]
        ]
        if not fitting:
            return chosen
        _, name, wider = max(fitting)
        left -= sizes[name][wider] - sizes[name][chosen[name]]
        chosen[name] = wider
