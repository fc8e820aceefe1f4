"""How many prompt tokens a step takes beside running sequences, so that their next tokens come in time (`--itl`).

A step's time is foretold as a fixed part and parts for each decode, each prompt token and each attended position, all
learned from the steps so far. The prompt tokens that fit under the objective are then handed out as one chunk or
several. What the forecast misses is learned too, and kept as a margin. Where decodes alone take longer than the
objective, prompts still advance, slowly: waiting for ever would help nobody. Without running sequences there is no
limit. Knows neither tensors nor queues; owned by the scheduler's shares.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tokenmill.engine.stats import EngineStats
from tokenmill.engine.step_fit import StepCostFit
from tokenmill.types import StepPlan

_POSITIONS = 1024.0  # attended positions are counted in these
_FIRST_CHUNK = 64  # prompt tokens beside decodes, before anything is known
_LEAST_CHUNK = 16  # that a step takes whatever the forecast says
_GROWTH = 2  # a chunk may be this many times larger than any before: costs are not known far beyond
_RISE, _FALL = 0.5, 0.01  # how fast the margin follows steps that took longer, and shorter, than foretold
_MIN_MARGIN, _MAX_MARGIN = 1.03, 2.0
_PAUSE_DECAY = 0.9  # of the mean time between two steps


class StepPace:
    def __init__(self, objective: float, stats: EngineStats, clock: Callable[[], float] = time.perf_counter) -> None:
        """`objective`: seconds from a token of a running sequence to its next one."""
        self.objective = objective
        self._stats = stats
        self._clock = clock
        self._fit = StepCostFit((0.0, 0.0, 0.0, 0.0))  # fixed, decode, prompt token, position
        self._margin = _MIN_MARGIN  # what steps took, as a multiple of what was foretold
        self._pause = 0.0  # seconds between the end of a step and the start of the next
        self._ended: float | None = None  # clock at the end of the last step, where sequences went on
        self._largest = _FIRST_CHUNK // _GROWTH  # prompt tokens of a step so far
        self._protects = False  # the step being scheduled has decodes
        self._left = 0.0  # seconds that it may still take
        self._taken = 0  # prompt tokens that it has

    # --- a step being scheduled ---

    def begin(self, num_decodes: int) -> None:
        self._protects = num_decodes > 0
        self._left = self.objective / self._margin - self._pause - self._fit.costs[0]
        self._taken = 0

    @property
    def exhausted(self) -> bool:
        """Whether no further prompt may begin in this step."""
        return self.limit(1 << 30, 0) == 0

    def limit(self, wanted: int, start: int) -> int:
        """How many of the `wanted` prompt tokens from position `start` on fit into the step."""
        if not self._protects:
            return wanted
        room = self._room(start) if self._fit.known else float(_FIRST_CHUNK - self._taken)
        fitting = min(int(room), _GROWTH * self._largest - self._taken)
        if fitting < _LEAST_CHUNK:  # a few tokens more would not be worth a row of their own
            fitting = max(0, _LEAST_CHUNK - self._taken)
        return min(wanted, fitting)

    def spare(self, wanted: int) -> int:
        """How many of the `wanted` drafted tokens fit into the step."""
        cost = self._fit.costs[1]
        if not self._protects or not self._fit.known or cost <= 0:
            return wanted
        return max(0, min(wanted, int(self._left / cost)))

    def take(self, start: int, count: int) -> None:
        """A row is planned. The last token of a prompt counts like a decode: it costs as much."""
        _, decode, token, position = self._fit.costs
        self._left -= (decode if count == 1 else token * count) + position * _attended(start, count)
        self._taken += count if count > 1 else 0

    def _room(self, start: int) -> float:
        """Tokens n of a chunk with token x n + position x n (start + n) = what is left."""
        _, _, token, position = self._fit.costs
        square, linear = position / _POSITIONS, token + position * start / _POSITIONS
        if self._left <= 0:
            return 0.0
        if square <= 0:
            return self._left / linear if linear > 0 else float(1 << 30)
        return 2 * self._left / (linear + math.sqrt(linear * linear + 4 * square * self._left))

    # --- a step that is over ---

    def record(self, plan: StepPlan, num_drafted: int, seconds: float) -> None:
        """`num_drafted`: tokens that were computed besides those of the plan."""
        counts = [(row.start, row.count) for row in plan.scheduled]
        decodes = sum(count == 1 for _, count in counts)
        prompts = sum(count for _, count in counts if count > 1)
        attended = sum(_attended(start, count) for start, count in counts)
        amounts = (1.0, float(decodes + num_drafted), float(prompts), attended)
        foretold = self._fit.seconds(amounts)
        if self._fit.known and foretold > 0 and decodes:
            ratio = seconds / foretold
            self._margin += (_RISE if ratio > self._margin else _FALL) * (ratio - self._margin)
            self._margin = min(_MAX_MARGIN, max(_MIN_MARGIN, self._margin))
        self._fit.record(amounts, seconds)
        self._largest = max(self._largest, prompts)
        self._time(bool(decodes), seconds)
        if self._protects and decodes:
            self._stats.num_late_steps += seconds + self._pause > self.objective
            self._stats.step_prompt_tokens = prompts

    def _time(self, goes_on: bool, seconds: float) -> None:
        now = self._clock()
        pause = max(0.0, now - seconds - self._ended) if self._ended is not None else self.objective
        if pause < self.objective:  # else the engine was idle
            self._pause = _PAUSE_DECAY * self._pause + (1.0 - _PAUSE_DECAY) * pause
        self._ended = now if goes_on else None


def _attended(start: int, count: int) -> float:
    return count * (start + count) / _POSITIONS
