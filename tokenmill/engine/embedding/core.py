"""The core of an encoder: a queue and a step, in the place of scheduler and runner.

An encoder computes a whole text at once and keeps nothing, so that a step is the next requests of the queue up to a
number of tokens, and each request ends with the step that computes it. Order is that of the queue discipline. The
engine loop drives it like EngineCore; imports no torch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Protocol

from tokenmill.engine.order.base import Discipline
from tokenmill.engine.order.queue import RequestQueue
from tokenmill.engine.stats import EngineStats
from tokenmill.types import Request, TokenEvent


class TextRunner(Protocol):
    def compute(self, requests: list[Request]) -> list[list[float]]:
        """The vector of each request, in order."""
        ...


class TokenMeter:
    """The time of each step, divided among its requests by their tokens."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def record(self, requests: list[Request], events: list[TokenEvent], seconds: float) -> None:
        total = sum(len(request.prompt_ids) for request in requests)
        for request, event in zip(requests, events, strict=True):
            share = seconds * len(request.prompt_ids) / total
            self._seconds[request.tenant] += share
            event.device_seconds = share

    def take(self) -> dict[str, float]:
        """Seconds by tenant since the last call."""
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken


class EncoderCore:
    def __init__(self, runner: TextRunner, discipline: Discipline, batch_tokens: int, concurrency: int) -> None:
        self.stats = EngineStats()
        self.meter: TokenMeter | None = None
        self._runner = runner
        self._discipline = discipline
        self._batch_tokens = batch_tokens
        self._max_rows = concurrency
        self._waiting = RequestQueue()
        self._requests: dict[str, Request] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def knows(self, request_id: str) -> bool:
        return request_id in self._requests

    def using(self, _digest: bytes) -> list[Request]:
        return []  # an encoder takes no adapters

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._waiting.add(request, self._discipline.key(request))
        self.stats.num_waiting = len(self._waiting)

    def cancel(self, request_id: str, index: int | None = None) -> bool:  # noqa: ARG002 (there is one of each)
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._waiting.remove(request)
        self._discipline.leave(request)
        self.stats.num_waiting = len(self._waiting)
        return True

    def measure(self) -> None:
        """Gauges are kept up to date with every change."""

    def check(self) -> None:
        """There are no pages that could be inconsistent."""

    def step(self, run: int = 1) -> list[TokenEvent]:  # noqa: ARG002 (nothing follows a vector)
        """Compute the next requests; each of them ends."""
        rows = self._take()
        if not rows:
            return []
        self.stats.num_running, self.stats.num_waiting = len(rows), len(self._waiting)
        began = time.perf_counter()
        vectors = self._runner.compute(rows)
        seconds = time.perf_counter() - began
        events = [
            TokenEvent(request.request_id, finish_reason="stop", embedding=vector)
            for request, vector in zip(rows, vectors, strict=True)
        ]
        self._end(rows, seconds)
        if self.meter is not None:
            self.meter.record(rows, events, seconds)
        return events

    def _take(self) -> list[Request]:
        """The requests of a step, no longer waiting: at least one, if there is any."""
        rows: list[Request] = []
        room = self._batch_tokens
        while len(self._waiting) and len(rows) < self._max_rows:
            request = self._discipline.next(self._waiting)
            length = len(request.prompt_ids)
            if rows and length > room:
                break
            self._waiting.remove(request)
            self._discipline.started(request)
            self._discipline.charge(request, length)
            rows.append(request)
            room -= length
        return rows

    def _end(self, rows: list[Request], seconds: float) -> None:
        counts: defaultdict[str, int] = defaultdict(int)
        for request in rows:
            del self._requests[request.request_id]
            self._discipline.stopped(request)
            self._discipline.leave(request)
            counts[request.tenant] += len(request.prompt_ids)
        self._discipline.record_step(counts, seconds)
        stats, num_tokens = self.stats, sum(counts.values())
        stats.num_steps += 1
        stats.num_tokens_computed += num_tokens
        stats.num_finished += len(rows)
        stats.step_tokens, stats.step_seconds = num_tokens, seconds
        stats.total_seconds += seconds
        stats.peak_running = max(stats.peak_running, len(rows))
        stats.num_running = 0
