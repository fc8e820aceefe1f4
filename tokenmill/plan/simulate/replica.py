"""A replica: one engine core with a SimRunner, and what it did with its time.

`begin` runs the next step (or a stride of decode steps) from a moment on and says when it ends; the cluster delivers
what the step brought at that moment. Knows neither other replicas nor where requests come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.engine.core import EngineCore
from tokenmill.engine.kv.manager import KVManager
from tokenmill.engine.kv.page_log import PageLog
from tokenmill.engine.kv.policy import POLICIES
from tokenmill.engine.order import DISCIPLINES
from tokenmill.engine.pace import StepPace
from tokenmill.engine.scheduler import Scheduler
from tokenmill.plan.simulate.engine_shape import EngineShape
from tokenmill.plan.simulate.pipeline import Pipeline
from tokenmill.plan.simulate.runner import CostModel, SimRunner
from tokenmill.plan.simulate.stride import longest_stride, stride
from tokenmill.route.prompt import Prompt
from tokenmill.route.target import LoadReport, Target, Ticket
from tokenmill.serve.tenants.limits import Pace
from tokenmill.types import Request, ScheduledTokens, TokenEvent

_SHORTEST_STRIDE = 2
_ROOT = b"simulated"  # of all page names


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What happened from one moment to `end`: the events of one step, or the times of a stride of `requests`."""

    end: float
    events: list[TokenEvent]
    times: list[float]  # of the steps of a stride; empty for a single step
    requests: list[Request]


class Replica:
    def __init__(
        self, number: int, pool: str, shape: EngineShape, cost: CostModel, prefix_caching: bool = True, now: float = 0.0
    ) -> None:
        self.number = number
        self.pool = pool  # "serve" | "prefill" | "decode"
        self.runner = SimRunner(cost)
        self.kv = KVManager(shape.layout, shape.num_pages, prefix_caching, POLICIES.get(shape.kv_policy)())
        # A decode pool receives prompts as KV: they take pages but no compute, and so no part of the token budget.
        budget = 1 << 30 if pool == "decode" else shape.batch_tokens
        discipline = DISCIPLINES.get(shape.scheduling)()
        clock = self.runner.clock
        self._pace = StepPace(shape.itl / 1000.0, self.kv.stats, clock) if shape.itl and pool != "decode" else None
        self.scheduler = Scheduler(self.kv, discipline, budget, shape.max_running, shape.context, pace=self._pace)
        self.core = EngineCore(self.scheduler, self.runner, clock)
        self.strides = True
        self.pipeline: Pipeline | None = None  # shared with the other loops of the deployment
        self.busy = False
        self.draining = False
        self.since = now  # paid from here on
        self.until: float | None = None  # paid up to here
        self.link_free_at = 0.0  # when the last KV transfer from here is over
        self.num_requests = 0
        self.num_steps = 0
        self.busy_ms = 0.0
        self.input_ms = 0.0
        self._target = Target(number, lambda: 0.0)  # what the router knows of it, without delay
        self._tickets: dict[str, Ticket] = {}
        self._speed = Pace()
        self._slots = shape.max_running
        self._page_log: PageLog | None = None
        self._untried = False  # a request that may be able to start arrived since the last step
        self._waits = any(group.kind == "sliding" for group in shape.layout.groups)

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.stats.num_preemptions

    @property
    def kv_use(self) -> float:
        return 1.0 - self.kv.num_available / self.kv.num_pages

    # --- what the router sees ---

    def name_pages(self, clock: Callable[[], float]) -> None:
        """Have the router told which pages are cached here; `clock` in seconds."""
        self._target = Target(self.number, clock)
        self._target.root, self._target.page_size = _ROOT, self.kv.layout.page_size
        self._page_log = self.kv.watch(_ROOT)

    @property
    def outstanding(self) -> int:
        return self._target.outstanding

    @property
    def outstanding_tokens(self) -> int:
        return self._target.outstanding_tokens

    def matched_tokens(self, prompt: Prompt) -> int:
        """How many of its tokens are cached here, or will be."""
        if self._page_log is not None:
            stored, removed = self._page_log.take()
            self._target.pages.apply((name for name, _ in stored), removed)
        return self._target.matched_tokens(prompt)

    def wait_seconds(self, uncached: int) -> float:
        rate, service = self._speed.prompt_rate, self._speed.service_seconds or 0.0
        self._target.report = LoadReport(
            self._slots, prompt_token_seconds=1 / rate if rate else 0.0, service_seconds=service
        )
        return self._target.wait_seconds(uncached)

    # --- requests ---

    def add(self, request: Request, prompt: Prompt, transferred: int = 0) -> None:
        if transferred:
            self.runner.transferred[request] = transferred
        self.core.add(request)
        self._tickets[request.request_id] = self._target.open(prompt, request.params.max_tokens)
        self.num_requests += 1
        self._untried = self._untried or self.scheduler.num_waiting == 1

    def started(self, events: list[TokenEvent]) -> None:
        """These tokens came: a first one among them ends the wait of its request."""
        for event in events:
            ticket = self._tickets.get(event.request_id)
            if ticket is not None:
                ticket.started()

    def leave(self, request: Request, service_ms: float) -> None:
        """A request of this replica has its last token, so long after its first."""
        self._tickets.pop(request.request_id).close()
        self._speed.record_service(service_ms / 1e3)
        self.runner.transferred.pop(request, None)

    def begin(self, now: float, bound: float) -> StepOutcome:
        """Compute from `now` on. `bound`: the time of the next event that concerns this replica."""
        rows = self._strideable()
        if rows:
            requests = [row.request for row in rows]
            limit = longest_stride(requests)
            if limit >= _SHORTEST_STRIDE:
                times = stride(rows, self.kv, self.runner.cost, limit, now, bound)
                if times:
                    return self._done(now, times, [], requests)
        preemptions = self.num_preemptions
        self._untried = False
        events = self.core.step()
        if self.num_preemptions > preemptions:
            self.runner.decodes_only = False
        self.input_ms += self.runner.input_ms
        self._speed.record_step(self.kv.stats)
        self.num_steps += 1
        self.busy_ms += self.runner.ms
        end = self.pipeline.end(now, self.runner.ms) if self.pipeline else now + self.runner.ms
        return StepOutcome(end, events, [], [])

    def _done(self, now: float, times: list[float], events: list[TokenEvent], requests: list[Request]) -> StepOutcome:
        for ms in times:  # one by one, so that the clock is the same as after single steps
            now += ms
            self.busy_ms += ms
        self.num_steps += len(times)
        return StepOutcome(now, events, times, requests)

    def _strideable(self) -> list[ScheduledTokens]:
        """The last rows of all running requests, in order, if the next step can only be one token for each; else none.

        That holds after a step of decodes only, in which no request finished or was preempted, unless a request arrived
        at an empty queue since. A queue that could not advance then cannot now: free pages only get fewer (except where
        sliding windows release some).
        """
        rows = self.runner.plan.scheduled
        if self._pace or self.pipeline or not (self.strides and self.runner.decodes_only) or self._untried or not rows:
            return []
        running, waiting = self.scheduler.num_running, self.scheduler.num_waiting
        if len(rows) != running or running >= self.scheduler.max_batch_tokens:
            return []
        if waiting and self._waits and running < self.scheduler.max_running:
            return []
        return rows
