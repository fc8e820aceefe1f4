"""A light deterministic simulation of a closed loop: `concurrency` users, each sending its next request on completion.

Steps come from StepCost; stretches where nothing joins or leaves are taken in one stride, so a benchmark of thousands
of requests takes milliseconds. Real traces through the real scheduler are the simulator's, users who have drifted apart
are steady_state.py's. Called by performance.py for lock-step arrivals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil
from statistics import fmean

from tokenmill.plan.cost.step_cost import Decode

StepTime = Callable[[list[tuple[int, int]], Decode], float]
_SIMULATED_ROUNDS = 4  # the first is the cold start; the rest stand for all later ones


@dataclass(frozen=True, slots=True)
class Load:
    """What the users send. Lengths spread evenly over [1 - spread, 1] x the nominal ones; all users start at once."""

    input_tokens: int
    output_tokens: int
    concurrency: int
    spread: float = 0.0
    rounds: int = 10  # requests per user
    cached_tokens: int = 0  # before each prompt, found in the cache: read by attention, not computed

    @property
    def mean_tokens(self) -> int:
        """Of a request, in the KV cache at its end."""
        return self.cached_tokens + round((self.input_tokens + self.output_tokens) * (1 - self.spread / 2))


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How the engine fills a step. `mixed`: prompt chunks ride with decodes; otherwise prompts stop them."""

    batch_tokens: int = 8192
    mixed: bool = True
    max_running: int = 1 << 30  # sequences that the KV cache and the engine's limit allow at once
    request_ms: float = 0.0  # front end: parse, tokenize, queue, detokenize the first token
    turnaround_ms: float = 20.0  # a user's next request arrives up to this much after the last answer
    in_flight: int = 1  # micro-batches in a pipeline at once; the load is one micro-batch's
    burstiness: float = 1.0  # coefficient of variation of the gaps between arrivals (1: Poisson)


@dataclass(frozen=True, slots=True)
class LoopResult:
    """Means over all requests of the benchmark, and over those after every user's first (the steady state)."""

    ttft_ms: float
    tpot_ms: float
    steady_ttft_ms: float
    steady_tpot_ms: float
    output_tok_s: float  # in the steady state
    saturated: bool  # requests waited for room, not only for their turn


@dataclass(slots=True)
class _Request:
    arrival: float
    prompt: int
    output: int
    done: int = 0  # prompt tokens computed
    first: float = 0.0


def run_closed_loop(step_ms: StepTime, load: Load, scheduling: Scheduling) -> LoopResult:
    return _Loop(step_ms, load, scheduling).run()


class _Loop:
    def __init__(self, step_ms: StepTime, load: Load, scheduling: Scheduling) -> None:
        self.step_ms, self.load, self.scheduling = step_ms, load, scheduling
        self.rounds = min(load.rounds, _SIMULATED_ROUNDS)
        self.clock = 0.0
        self.steps = 0  # decode steps taken
        self.context = 0  # tokens that all decoding sequences see
        self.decoding: list[tuple[int, int, _Request]] = []  # heap by the step at which each ends
        self.travelling: list[tuple[float, int, _Request]] = []  # heap by arrival
        self.waiting: deque[_Request] = deque()
        self.current: deque[_Request] = deque()  # admitted, prompt not finished
        self.ttft: list[float] = []
        self.tpot: list[float] = []
        self.generated = 0
        self.saturated = False
        self._lengths = _lengths(load)
        self._sent = 0

    def run(self) -> LoopResult:
        total = self.load.concurrency * self.rounds
        for _ in range(self.load.concurrency):
            self._send()
        while len(self.tpot) < total:
            self._arrive()
            self._admit()
            if self.current:
                self._step_with_prompts()
            else:
                self._stride()
            self._finish(total)
        first = 1.0 / self.load.rounds  # share of the requests that met an empty engine and each other
        users = self.load.concurrency
        ttft, tpot = (fmean(line[users:] or line) for line in (self.ttft, self.tpot))
        return LoopResult(
            ttft_ms=first * fmean(self.ttft[:users]) + (1 - first) * ttft,
            tpot_ms=first * fmean(self.tpot[:users]) + (1 - first) * tpot,
            steady_ttft_ms=ttft,
            steady_tpot_ms=tpot,
            output_tok_s=1e3 * self.generated / self.clock,
            saturated=self.saturated,
        )

    def _send(self) -> None:
        prompt, output = next(self._lengths)
        delay = self.scheduling.turnaround_ms * ((self._sent * 0.4142135624) % 1.0)
        heappush(self.travelling, (self.clock + delay, self._sent, _Request(self.clock + delay, prompt, output)))
        self._sent += 1

    def _arrive(self) -> None:
        """Requests that arrived while the last step ran; an idle engine waits for the first."""
        if not (self.waiting or self.current or self.decoding) and self.travelling[0][0] > self.clock:
            self.clock = self.travelling[0][0]
        while self.travelling and self.travelling[0][0] <= self.clock:
            self.waiting.append(heappop(self.travelling)[2])

    def _admit(self) -> None:
        room = self.scheduling.max_running - len(self.decoding) - len(self.current)
        while self.waiting and room > 0:
            self.current.append(self.waiting.popleft())
            room -= 1
        if self.waiting:
            self.saturated = True

    def _step_with_prompts(self) -> None:
        """One step: decodes first (if they may ride along), then prompts in order of arrival up to the budget."""
        rides = self.scheduling.mixed
        count = len(self.decoding) if rides else 0
        budget = max(self.scheduling.batch_tokens - count, 16)
        chunks: list[tuple[int, int]] = []
        for request in self.current:
            new = min(request.prompt - request.done, budget)
            if new <= 0:
                break
            chunks.append((new, self.load.cached_tokens + request.done))
            request.done += new
            budget -= new
        self.clock += self.step_ms(chunks, (count, float(self.context if rides else 0)))
        if count:
            self.steps += 1
            self.context += count
        while self.current and self.current[0].done >= self.current[0].prompt:
            self._start_decoding(self.current.popleft())

    def _start_decoding(self, request: _Request) -> None:
        request.first = self.clock
        self.ttft.append(self.clock - request.arrival + self.scheduling.request_ms)
        self.context += self.load.cached_tokens + request.prompt + 1
        heappush(self.decoding, (self.steps + request.output - 1, self._sent * 1_000_000 + len(self.ttft), request))

    def _stride(self) -> None:
        """Decode until the first sequence ends or a request arrives, at the cost of the middle of the stretch."""
        count = len(self.decoding)
        steps = max(self.decoding[0][0] - self.steps, 1)
        middle = self.context + count * (steps - 1) / 2
        step_ms = self.step_ms([], (count, middle))
        if self.travelling:
            steps = min(steps, max(1, ceil((self.travelling[0][0] - self.clock) / step_ms)))
        self.clock += steps * step_ms
        self.steps += steps
        self.context += count * steps

    def _finish(self, total: int) -> None:
        while self.decoding and self.decoding[0][0] <= self.steps:
            _, _, request = heappop(self.decoding)
            self.context -= self.load.cached_tokens + request.prompt + request.output
            self.generated += request.output
            self.tpot.append((self.clock - request.first) / max(request.output - 1, 1))
            if self._sent < total:
                self._send()


def _lengths(load: Load) -> Iterator[tuple[int, int]]:
    """Lengths without randomness: two golden-ratio sequences, so that any stretch of requests is evenly spread."""
    i = 0
    while True:
        first, second = (i * 0.6180339887 + 0.5) % 1.0, (i * 0.7548776662 + 0.25) % 1.0
        prompt = load.input_tokens * (1.0 - load.spread * first)
        output = load.output_tokens * (1.0 - load.spread * second)
        yield max(1, round(prompt)), max(2, round(output))
        i += 1
