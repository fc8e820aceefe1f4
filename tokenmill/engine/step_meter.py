"""Whose device time a step was: its seconds divided among the sequences in it, by what each adds to a step.

A step takes a fixed time, whatever is in it (the weights are read), time for each token, and time for each position
that a token attends to. The three are learned from the steps themselves. The fixed time is divided equally; the parts
of a step always add up to its seconds, however well the costs are known. Time is summed by tenant, and leaves with the
events of each sequence. Knows neither prices nor keys; EngineCore calls it where a server bills by device time.
"""

from __future__ import annotations

from collections import defaultdict

from tokenmill.engine.step_fit import StepCostFit
from tokenmill.types import StepPlan, StepResult, TokenEvent

_POSITIONS = 1024.0  # attended positions are counted in these, which keeps the sums of one size


class StepMeter:
    def __init__(self) -> None:
        self._fit = StepCostFit((0.0, 1.0, 0.0))  # fixed, token, position; before anything is known tokens count
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
        self._fit.record((1.0, float(num_tokens), num_attended), seconds)

    def take(self) -> dict[str, float]:
        """Seconds by tenant since the last call."""
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken
