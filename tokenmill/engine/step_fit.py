"""What steps cost, learned from the steps themselves: seconds as a sum of amounts times costs.

Least squares over the last some hundred steps, with no cost below zero. What the amounts mean is the caller's: the
meter divides a step's time by such costs, and the pace foretells a step with them. Imports nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

_DECAY = 0.995  # weight of a step in the next one
_FIT_STEPS = 16  # from one fit to the next
_MAX_SURPRISE = 3.0  # a step that took longer than this times the prediction teaches no more than this
_DAMPING = 1e-3


class StepCostFit:
    """`costs`: what stands in for them until enough steps are known."""

    def __init__(self, costs: Sequence[float]) -> None:
        self.costs = tuple(costs)
        size = len(self.costs)
        self._terms = [terms for length in range(size, 0, -1) for terms in combinations(range(size), length)]
        self._num_steps = 0
        self._products = [[0.0] * size for _ in range(size)]  # decaying sums
        self._targets = [0.0] * size

    @property
    def known(self) -> bool:
        return self._num_steps >= _FIT_STEPS

    def seconds(self, amounts: Sequence[float]) -> float:
        return sum(cost * amount for cost, amount in zip(self.costs, amounts, strict=True))

    def record(self, amounts: Sequence[float], seconds: float) -> None:
        if self.known:
            usual = self.seconds(amounts)
            seconds = min(seconds, _MAX_SURPRISE * usual) if usual > 0 else seconds
        for row, amount in enumerate(amounts):
            products = self._products[row]
            for column, other in enumerate(amounts):
                products[column] = _DECAY * products[column] + amount * other
            self._targets[row] = _DECAY * self._targets[row] + amount * seconds
        self._num_steps += 1
        if self._num_steps % _FIT_STEPS == 0:
            self._fit()

    def _fit(self) -> None:
        """Of the fits with some of the terms whose costs are all positive, the best one. More terms fit better: what
        is left of the squares decides."""
        best, best_left = self.costs, float("inf")
        for terms in self._terms:
            if any(self._products[term][term] <= 0 for term in terms):  # not one step had any of it
                continue
            matrix = [[self._products[row][column] for column in terms] for row in terms]
            found = _solve(matrix, [self._targets[row] for row in terms])
            if min(found) < 0 or max(found) <= 0:
                continue
            left = -sum(cost * self._targets[term] for cost, term in zip(found, terms, strict=True))
            if left < best_left:
                costs = dict(zip(terms, found, strict=True))
                best, best_left = tuple(costs.get(term, 0.0) for term in range(len(self.costs))), left
        self.costs = best


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Least squares by their normal equations, with a little damping: what steps that are all alike cannot tell apart
    is then divided evenly."""
    size = len(vector)
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    for place in range(size):
        rows[place][place] *= 1 + _DAMPING
    for place in range(size):
        for row in range(place + 1, size):
            factor = rows[row][place] / rows[place][place]
            rows[row] = [value - factor * above for value, above in zip(rows[row], rows[place], strict=True)]
    found = [0.0] * size
    for row in reversed(range(size)):
        known = sum(rows[row][place] * found[place] for place in range(row + 1, size))
        found[row] = (rows[row][size] - known) / rows[row][row]
    return found
