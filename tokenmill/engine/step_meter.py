"""Whose device time a step was: its seconds divided among the sequences in it, by what each adds to a step.

A step takes a fixed time, whatever is in it (the weights are read), time for each token, and time for each position
that a token attends to. The three are learned from the steps themselves. The fixed time is divided equally; the parts
of a step always add up to its seconds, however well the costs are known. Time is summed by tenant, and leaves with the
events of each sequence. Knows neither prices nor keys; EngineCore calls it where a server bills by device time.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

from tokenmill.types import StepPlan, StepResult, TokenEvent

_DECAY = 0.995  # weight of a step in the next one
_FIT_STEPS = 16  # from one fit to the next
_MAX_SURPRISE = 3.0  # a step that took longer than this times the prediction teaches no more than this
_DAMPING = 1e-3
_POSITIONS = 1024.0  # attended positions are counted in these, which keeps the sums of one size
_NUM_COSTS = 3
_TERMS = [terms for size in (3, 2, 1) for terms in combinations(range(_NUM_COSTS), size)]


class StepCostFit:
    """seconds = fixed + tokens x token + attended x position: the least squares over the last some hundred steps, with
    no cost below zero."""

    def __init__(self) -> None:
        self.costs = (0.0, 1.0, 0.0)  # fixed, token, position (of 1024); before anything is known tokens count
        self._num_steps = 0
        self._products = [[0.0] * _NUM_COSTS for _ in range(_NUM_COSTS)]  # decaying sums
        self._targets = [0.0] * _NUM_COSTS

    @property
    def known(self) -> bool:
        return self._num_steps >= _FIT_STEPS

    def record(self, num_tokens: int, attended: float, seconds: float) -> None:
        amounts = (1.0, float(num_tokens), attended)
        if self.known:
            usual = sum(cost * amount for cost, amount in zip(self.costs, amounts, strict=True))
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
        for terms in _TERMS:
            matrix = [[self._products[row][column] for column in terms] for row in terms]
            found = _solve(matrix, [self._targets[row] for row in terms])
            if min(found) < 0 or max(found) <= 0:
                continue
            left = -sum(cost * self._targets[term] for cost, term in zip(found, terms, strict=True))
            if left < best_left:
                costs = dict(zip(terms, found, strict=True))
                best, best_left = (costs.get(0, 0.0), costs.get(1, 0.0), costs.get(2, 0.0)), left
        self.costs = best


class StepMeter:
    def __init__(self) -> None:
        self._fit = StepCostFit()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def record(self, plan: StepPlan, result: StepResult, events: list[TokenEvent], seconds: float) -> None:
        """A step is over: `seconds` is what the runner took, `events` what it brought, in the order of its rows."""
        rows = plan.scheduled
        counts = [row.count for row in rows]
        for number, num_drafted in result.num_drafted.items():
            counts[number] += num_drafted
        attended = [count * (row.start + count) / _POSITIONS for row, count in zip(rows, counts, strict=True)]
        num_tokens, num_attended = sum(counts), sum(attended)
        fixed, token, position = self._fit.costs
        scale = seconds / (fixed + token * num_tokens + position * num_attended)
        base, by_token, by_position = scale * fixed / len(rows), scale * token, scale * position
        waiting = iter(events)
        event = next(waiting, None)
        for row, count, positions in zip(rows, counts, attended, strict=True):
            request = row.request
            share = base + by_token * count + by_position * positions
            self._seconds[request.tenant] += share
            if event is not None and event.request_id == request.request_id and event.index == request.index:
                event.device_seconds, request.device_seconds = request.device_seconds + share, 0.0
                event = next(waiting, None)
            else:
                request.device_seconds += share
        self._fit.record(num_tokens, num_attended, seconds)

    def take(self) -> dict[str, float]:
        """Seconds by tenant since the last call."""
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken


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
