"""Several steps under way at once, for runners that compute a step in stages: each stage then has one to compute.

The running sequences fall into lanes, one step each. A step begins before the one before it has ended; sequences of a
step that is under way are neither scheduled again nor preempted, and one that is cancelled meanwhile leaves its row
without an owner. Every stage computes steps in the order in which they began, so pages that changed hands are written
by the new owner last. The core for engines with pipeline stages; knows neither tensors nor ranks.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Protocol

from tokenmill.engine.core import EngineCore, Runner
from tokenmill.engine.scheduler import Scheduler
from tokenmill.types import StepPlan, StepResult, TokenEvent

MIN_SEQUENCES = 4  # of a lane: a step of fewer takes nearly as long, since it reads all weights too (docs/ranks.md)


class StagedRunner(Runner, Protocol):
    def begin(self, plan: StepPlan) -> Any:
        """The first half of `execute`: the step is on its way."""
        ...

    def finish(self, begun: Any) -> StepResult:
        """The second half; steps end in the order in which they began."""
        ...


class LaneCore(EngineCore):
    def __init__(self, scheduler: Scheduler, runner: StagedRunner, lanes: int) -> None:
        super().__init__(scheduler, runner)
        self._staged, self._lanes = runner, lanes
        self._flying: deque[tuple[StepPlan, Any]] = deque()
        self._ended = 0.0  # when the last step did

    def step(self, run: int = 1) -> list[TokenEvent]:  # noqa: ARG002 (tokens come one by one)
        """Begin steps until every lane has one, and end the oldest. Where somebody times the runner's steps (it was
        wrapped), there is one at a time."""
        if not self._flying:
            self._ended = time.perf_counter()
            if self.runner is not self._staged:
                self.scheduler.in_flight, self.scheduler.max_decodes = set(), None
                return super().step()
        while len(self._flying) < self._num_lanes and self.runner is self._staged:
            plan = self._schedule()
            if not plan.scheduled:
                break
            self._flying.append((plan, self._staged.begin(plan)))
        if not self._flying:
            assert not self.has_work or self.scheduler.is_loading, "requests wait but none can be scheduled"
            return []
        plan, begun = self._flying.popleft()
        result = self._staged.finish(begun)
        now = time.perf_counter()
        seconds, self._ended = now - self._ended, now
        events = self._take_in(plan, result, seconds)
        self._end_ownerless()
        return events

    def _schedule(self) -> StepPlan:
        scheduler = self.scheduler
        scheduler.in_flight = {row.request for plan, _ in self._flying for row in plan.scheduled}
        scheduler.max_decodes = -(-scheduler.num_running // self._num_lanes)
        return scheduler.schedule()

    @property
    def _num_lanes(self) -> int:
        return self._lanes if self.scheduler.num_running >= MIN_SEQUENCES * self._lanes else 1

    def cancel(self, request_id: str, index: int | None = None) -> bool:
        known = super().cancel(request_id, index)
        self._end_ownerless()
        return known

    def _end_ownerless(self) -> None:
        """Nobody asks for steps any more: those under way are ended, or stages would wait for each other."""
        while self._flying and not self.has_work:
            _, begun = self._flying.popleft()
            self._staged.finish(begun)
