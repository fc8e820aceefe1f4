"""The engine core: one step is schedule, execute, update, emit. This is the whole architecture in one function.

Owns the order of the four verbs; knows neither tensors nor text. The runner may be the real runtime or a cost model.
Called by the engine loop and the simulator, from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from tokenmill.engine.scheduler import Scheduler
from tokenmill.engine.step_meter import StepMeter
from tokenmill.engine.timelines import Timelines
from tokenmill.types import Request, StepPlan, StepResult, TokenEvent


class Runner(Protocol):
    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the page copies, compute every row, sample where a row says so. Plan and requests are read-only."""
        ...


class EngineCore:
    def __init__(self, scheduler: Scheduler, runner: Runner, clock: Callable[[], float] | None = None) -> None:
        """`clock`: seconds by which steps are timed; a cost model has a clock of its own."""
        self.scheduler = scheduler
        self.runner = runner
        self._clock = clock
        self.stats = scheduler.stats
        self.meter: StepMeter | None = None  # where device time is billed
        self.timelines: Timelines | None = None  # where a server tells requests what took how long

    def step(self, run: int = 1) -> list[TokenEvent]:
        """Compute one batch; what it brought, at most one event for each running sequence. Nothing to do, or all
        requests wait for an adapter or for pages from a tier: no events. Where nobody waits for single tokens, `run` of
        them may come at once: less time goes by between them."""
        plan = self.scheduler.schedule(run)
        if not plan.scheduled:
            assert not self.has_work or self.scheduler.is_loading, "requests wait but none can be scheduled"
            return []
        clock = self._clock or time.perf_counter
        began = clock()
        result = self.runner.execute(plan)
        return self._take_in(plan, result, clock() - began)

    def _take_in(self, plan: StepPlan, result: StepResult, seconds: float) -> list[TokenEvent]:
        if self.timelines is not None:
            self.timelines.record(plan, seconds)
        events = self.scheduler.update(plan, result)
        self.scheduler.record_step(plan, events, seconds)
        if self.meter is not None:
            self.meter.record(plan, result, events, seconds)
        return events

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        if self.timelines is not None:
            self.timelines.open(request)
        self.scheduler.add(request)

    def knows(self, request_id: str) -> bool:
        return self.scheduler.knows(request_id)

    def using(self, digest: bytes) -> list[Request]:
        """The sequences of a version of an adapter."""
        return self.scheduler.using(digest)

    def measure(self) -> None:
        """Bring the gauges up to date."""
        self.scheduler.measure()

    def check(self) -> None:
        """Raise AssertionError if the pages are inconsistent."""
        self.scheduler.kv.check()

    def cancel(self, request_id: str, index: int | None = None) -> bool:
        if self.timelines is not None:
            self.timelines.forget(request_id)
        return self.scheduler.cancel(request_id, index)
