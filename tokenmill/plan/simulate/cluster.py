"""The cluster: a clock, replicas, a router, and what happens when. Discrete events, in order of time.

Arrivals, transfers, started replicas and autoscaler ticks are external events; the ends of steps are internal ones. At
equal times external events go first, so that a step sees everything that arrived before it begins. Owns the life of a
request from arrival to record; knows neither costs nor formats.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from math import inf

from tokenmill.plan.simulate.autoscaler import Autoscaler, Autoscaling
from tokenmill.plan.simulate.engine_shape import EngineShape
from tokenmill.plan.simulate.pipeline import Pipeline
from tokenmill.plan.simulate.records import Records, RequestRecord
from tokenmill.plan.simulate.replica import Replica, StepOutcome
from tokenmill.plan.simulate.runner import CostModel, output_id
from tokenmill.plan.simulate.workload import Arrival, Workload
from tokenmill.route.policies import POLICIES
from tokenmill.route.policies.base import Policy
from tokenmill.route.prompt import Prompt
from tokenmill.types import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Engines that do the same work. `replicas` counts engine loops; each `stages` of them share a pipeline."""

    shape: EngineShape
    cost: CostModel
    replicas: int = 1
    stages: int = 1


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """`decode`: engines that take over after the first token (disaggregation); `transfer_ms` is for a prompt's KV."""

    serve: PoolSettings
    router: str = "round_robin"
    prefix_caching: bool = True
    autoscaling: Autoscaling | None = None
    decode: PoolSettings | None = None
    transfer_ms: Callable[[int], float] = lambda _tokens: 0.0
    strides: bool = True


class Cluster:
    def __init__(self, settings: ClusterSettings, workload: Workload) -> None:
        self.settings = settings
        self.workload = workload
        self.records = Records()
        self.now = 0.0
        self.replicas: list[Replica] = []  # all that ever existed
        self.num_starting = 0
        self._router: Policy = POLICIES.get(settings.router)()
        self._decode_router: Policy = POLICIES.get("least_loaded")()
        self._autoscaler = Autoscaler(settings.autoscaling) if settings.autoscaling else None
        self._arrivals: Iterator[Arrival] = workload.arrivals()
        self._more = True
        self._outside: list[tuple[float, int, Callable[[], None]]] = []
        self._steps: list[tuple[float, int, Replica, StepOutcome | None]] = []
        self._order = count()
        self._requests: dict[str, Request] = {}
        # Replicas affect each other through external events only, unless a request that ends causes one.
        self._independent = not workload.users and settings.decode is None

    # --- the clock ---

    def run(self) -> Records:
        first = self.settings.autoscaling.min_replicas if self.settings.autoscaling else self.settings.serve.replicas
        for _ in range(max(first, self.settings.serve.replicas)):
            self._open_replica("prefill" if self.settings.decode else "serve", self.settings.serve)
        for _ in range(self.settings.decode.replicas if self.settings.decode else 0):
            assert self.settings.decode is not None
            self._open_replica("decode", self.settings.decode)
        for _ in range(self.workload.users or 1):
            self._send_next()
        if self._autoscaler:
            self._at(self._autoscaler.settings.tick_s * 1e3, self._tick)
        with _without_garbage_collection():
            while self._outside or self._steps:
                self._next()
        for replica in self.replicas:
            replica.until = self.now if replica.until is None else replica.until
        return self.records

    def _next(self) -> None:
        if self._outside and (not self._steps or self._outside[0][0] <= self._steps[0][0]):
            self.now, _, action = heappop(self._outside)
            action()
            return
        self.now, _, replica, outcome = heappop(self._steps)
        if outcome is not None:
            self._end_step(replica, outcome)
        self._begin_step(replica)
        self.records.sample(self.now, self.active())

    def _at(self, ms: float, action: Callable[[], None]) -> None:
        heappush(self._outside, (ms, next(self._order), action))

    def active(self) -> list[Replica]:
        """Replicas that accept requests or still have some."""
        return [replica for replica in self.replicas if replica.until is None]

    # --- requests ---

    def _send_next(self) -> None:
        """Take the next row of the workload; in a closed loop it is sent now."""
        arrival = next(self._arrivals, None)
        if arrival is None:
            self._more = False
            return
        self._at(self.now if self.workload.users else max(self.now, arrival.ms), lambda: self._arrive(arrival))

    def _arrive(self, arrival: Arrival) -> None:
        if not self.workload.users:
            self._send_next()
        longest = self._longest_context()
        if arrival.prompt_tokens + arrival.output_tokens > longest:
            self.records.refused += 1
            if self.workload.users:
                self._send_next()
            return
        tokens = 1 if self.settings.decode else arrival.output_tokens
        request = Request(str(arrival.number), arrival.prompt_ids(), _params(tokens), arrival=arrival.number)
        record = RequestRecord(arrival, self.now)
        self.records.live[request.request_id] = record
        pool = "prefill" if self.settings.decode else "serve"
        prompt = Prompt(request.token_ids)
        replica = self._router.choose(prompt, self._ready(pool))
        record.replica = replica.number
        self._give(request, replica, prompt)

    def _longest_context(self) -> int:
        decode = self.settings.decode
        return min(
            self.settings.serve.shape.context, decode.shape.context if decode else self.settings.serve.shape.context
        )

    def _give(self, request: Request, replica: Replica, prompt: Prompt, transferred: int = 0) -> None:
        self._requests[request.request_id] = request
        replica.add(request, prompt, transferred)
        if not replica.busy:  # it starts once all events of this moment have been handled
            replica.busy = True
            heappush(self._steps, (self.now, next(self._order), replica, None))

    def _begin_step(self, replica: Replica) -> None:
        if not replica.core.has_work:
            replica.busy = False
            if replica.draining:
                replica.until = self.now
            return
        bound = self._outside[0][0] if self._outside else inf
        if not self._independent and self._steps:
            bound = min(bound, self._steps[0][0])
        outcome = replica.begin(self.now, bound)
        heappush(self._steps, (outcome.end, next(self._order), replica, outcome))

    def _end_step(self, replica: Replica, outcome: StepOutcome) -> None:
        replica.started(outcome.events)
        for record in self.records.take(outcome, self.now):
            request_id = str(record.arrival.number)
            request = self._requests.pop(request_id)
            replica.leave(request, self.now - record.first)
            if replica.pool == "prefill" and record.arrival.output_tokens > 1:
                self._transfer(request, record, replica)
                continue
            self.records.finished.append(self.records.live.pop(request_id))
            if self.workload.users:
                self._send_next()

    def _transfer(self, request: Request, record: RequestRecord, source: Replica) -> None:
        """Send a prompt's KV to a decode replica. Transfers from one replica follow each other."""
        moved = self.settings.transfer_ms(len(request.prompt_ids))
        source.link_free_at = max(self.now, source.link_free_at) + moved
        follow = Request(
            request.request_id,
            [*request.prompt_ids, output_id(request)],
            _params(record.arrival.output_tokens - 1),
            arrival=request.arrival,
        )

        def arrive() -> None:
            prompt = Prompt((), follow.num_tokens)  # it comes as KV: nothing is looked up
            self._give(
                follow, self._decode_router.choose(prompt, self._ready("decode")), prompt, len(request.prompt_ids)
            )

        self._at(source.link_free_at, arrive)

    # --- replicas ---

    def _ready(self, pool: str) -> list[Replica]:
        return [r for r in self.replicas if r.pool == pool and not r.draining and r.until is None]

    def _open_replica(self, pool: str, settings: PoolSettings, since: float = 0.0) -> None:
        replica = Replica(len(self.replicas), pool, settings.shape, settings.cost, self.settings.prefix_caching, since)
        replica.strides = self.settings.strides
        if self._router.looks_up and pool != "decode":
            replica.name_pages(lambda: self.now / 1e3)
        if settings.stages > 1:
            replica.pipeline = self._pipeline_of(pool, settings.stages)
        self.replicas.append(replica)

    def _pipeline_of(self, pool: str, stages: int) -> Pipeline:
        """Loops are opened in order: each `stages` of a pool belong to one deployment."""
        loops = [replica for replica in self.replicas if replica.pool == pool]
        joined = loops[-1].pipeline if len(loops) % stages else None
        return joined or Pipeline(stages)

    def _tick(self) -> None:
        """Ask the autoscaler; start replicas (ready after their cold start) or drain some."""
        assert self._autoscaler is not None
        scaling = self._autoscaler.settings
        pool = "prefill" if self.settings.decode else "serve"
        ready = self._ready(pool)
        queue = sum(replica.scheduler.num_waiting for replica in ready)
        kv_use = sum(replica.kv_use for replica in ready) / len(ready)
        present = len(ready) + self.num_starting
        wanted = self._autoscaler.desired(self.now / 1e3, len(ready), present, queue, kv_use)
        for _ in range(wanted - present):
            self.num_starting += 1
            self._at(self.now + scaling.cold_start_s * 1e3, self._starter(pool, self.now))
        for replica in sorted(ready, key=lambda each: each.outstanding)[: max(0, len(ready) - max(1, wanted))]:
            replica.draining = True
            if not replica.busy:
                replica.until = self.now
        if self._more or self.records.live:
            self._at(self.now + scaling.tick_s * 1e3, self._tick)

    def _starter(self, pool: str, since: float) -> Callable[[], None]:
        def start() -> None:
            self.num_starting -= 1
            self._open_replica(pool, self.settings.serve, since)

        return start


@lru_cache(maxsize=4096)
def _params(max_tokens: int) -> SamplingParams:
    """Immutable, so one per length is enough: a trace repeats the same lengths."""
    return SamplingParams(max_tokens=max_tokens)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Millions of small objects without reference cycles: collecting would take most of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
