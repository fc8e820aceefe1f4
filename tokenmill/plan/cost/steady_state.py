"""The steady state in closed form: TTFT, TPOT and throughput of users whose requests have drifted apart.

Prompts join decode steps at random (Poisson); Little's law ties users, running sequences and waiting together, and one
number is solved for. Takes half a millisecond whatever the load, so that a search can ask thousands of times. A
benchmark's cold start is closed_loop.py's, percentiles and bursts are the simulator's. Called by performance.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf

from tokenmill.plan.cost.closed_loop import Load, Scheduling, StepTime

_RARE = 1e-3  # numbers of prompts in a step that are less likely are left out
_BUSIEST = 0.98  # share of the steps' room for prompts: beyond it the wait would have no end
_CLOSE, _ATTEMPTS = 5e-3, 4  # of the users: how exactly the decoding ones are found

_Times = list[tuple[float, float]]  # (probability, milliseconds)


@dataclass(frozen=True, slots=True)
class SteadyState:
    ttft_ms: float
    tpot_ms: float
    output_tok_s: float
    saturated: bool  # requests wait for room, not only for their turn
    stretch: float = 1.0  # step over the time it would take alone: waiting for slower micro-batches in the pipeline


@dataclass(frozen=True, slots=True)
class _Point:
    """What holds while `decoding` sequences run on average."""

    tpot_ms: float
    wait_ms: float  # for the running step and one's own prompt
    rate: float  # requests finished per ms
    stretch: float


def steady_state(step_ms: StepTime, load: Load, scheduling: Scheduling) -> SteadyState:
    return _Steady(step_ms, load, scheduling).solve()


class _Steady:
    def __init__(self, step_ms: StepTime, load: Load, scheduling: Scheduling) -> None:
        mean = 1.0 - load.spread / 2
        self.step_ms, self.scheduling, self.users = step_ms, scheduling, load.concurrency
        self.prompt = max(1, round(load.input_tokens * mean))
        self.output = max(2.0, load.output_tokens * mean)
        self.cached = load.cached_tokens
        self.context = load.cached_tokens + load.input_tokens * mean + self.output / 2
        self.turnaround = scheduling.turnaround_ms / 2
        self._times: dict[tuple[int, int, bool], float] = {}

    def solve(self) -> SteadyState:
        """The number of decoding sequences at which decoding, waiting and thinking users add up to all."""
        decoding = min(float(min(self.users, self.scheduling.max_running)), self._max_decoding())
        point = self._at(decoding)
        users = self._users_at(decoding, point)
        if (
            users <= self.users
        ):  # Little's law: users who neither decode nor think wait for KV memory or for others' prompts
            ttft = (self.users - decoding) / point.rate - self.turnaround
        else:
            point = self._balance(decoding, users)
            ttft = point.wait_ms + self.scheduling.request_ms
        saturated = self.users > self.scheduling.max_running
        return SteadyState(ttft, point.tpot_ms, 1e3 * self.output * point.rate, saturated, point.stretch)

    def _balance(self, high: float, users: float) -> _Point:
        """Where users add up, below `high` with its `users`: an almost constant share of them decodes, except where
        prompts fill the steps; there the bracket is halved."""
        low, decoding, attempt = 0.0, high, 0
        while True:
            guess = decoding * self.users / users
            decoding = guess if low < guess < high and attempt < _ATTEMPTS else (low + high) / 2
            point, attempt = self._at(decoding), attempt + 1
            users = self._users_at(decoding, point)
            low, high = (low, decoding) if users > self.users else (decoding, high)
            if abs(users - self.users) < _CLOSE * self.users or high - low < _CLOSE:
                return point

    def _users_at(self, decoding: float, point: _Point) -> float:
        return decoding + point.rate * (point.wait_ms + self.scheduling.request_ms + self.turnaround)

    def _at(self, decoding: float) -> _Point:
        others = decoding * (1 - 1 / self.users)  # that one sequence meets
        prompts = others / (self.output - 1)  # of theirs, per step
        batch = round(others)
        own = self._step_times(batch + 1, prompts)
        tpot, square = _moments(own)
        alone = tpot
        if self.scheduling.in_flight > 1:
            elsewhere = self._step_times(batch + 1, decoding / (self.output - 1))
            tpot, square = _moments(_slowest(own, elsewhere, self.scheduling.in_flight))
        residual = min(1.0, others) * square / (2 * tpot)  # of the step that one arrives in
        wait = residual + self._own_prompt(batch, prompts)
        return _Point(tpot, wait, decoding / ((self.output - 1) * tpot), tpot / alone)

    def _step_times(self, count: int, prompts: float) -> _Times:
        """A step's time with `count` decodes and a Poisson number of prompts, shortest first."""
        capacity = self._capacity(count)
        if capacity < 1:  # a prompt is `1 / capacity` steps
            share = min(1.0, prompts / capacity)
            return [(1 - share, self._time(count, 0)), (share, self._time(count, 1))]
        times: _Times = []
        found, chance, number = 0.0, exp(-prompts), 0
        while number <= capacity and (chance > _RARE or number <= prompts):
            times.append((chance, self._time(count, number)))
            found += chance * number
            number += 1
            chance *= prompts / number
        rest = max(0.0, prompts - found) / max(1, number - 1)  # prompts that did not fit wait for a later step
        (first, plain), (last, full) = times[0], times[-1]
        if len(times) > 1:
            times[0], times[-1] = (first - rest, plain), (last + rest, full)
        return times

    def _own_prompt(self, count: int, prompts: float) -> float:
        """From the end of the step that one arrives in to the first token: prompts before one's own, then it."""
        capacity = self._capacity(count)
        together = int(max(1, min(capacity, 1 + round(prompts))))
        own = self._time(count, together, alone=True) / min(1.0, capacity)
        busy = min(prompts / capacity, _BUSIEST)
        queue = own * busy ** max(1.0, capacity) / (2 * (1 - busy)) / max(1.0, capacity)
        return own + queue * (1 + self.scheduling.burstiness**2) / 2  # Allen and Cunneen

    def _max_decoding(self) -> float:
        """More would end, and send their next prompts, faster than steps can take prompts in."""
        return self._capacity(self.scheduling.max_running) * (self.output - 1) * self.users / max(1, self.users - 1)

    def _capacity(self, count: int) -> float:
        """Prompts that one step takes in at most; below one a prompt takes several steps."""
        if not self.scheduling.mixed:
            return inf  # all that wait are computed before decodes go on
        budget = self._budget(count)
        return budget // self.prompt if self.prompt <= budget else budget / self.prompt

    def _budget(self, count: int) -> int:
        tokens = self.scheduling.batch_tokens
        return max(tokens - min(count, self.users), 16) if self.scheduling.mixed else tokens

    def _time(self, count: int, prompts: int, alone: bool = False) -> float:
        """A step of `count` decodes and `prompts` prompts, or one chunk of a long one. Where prompts stop decodes, a
        decoding sequence sees both; `alone` is the prompts' own part."""
        key = (count, prompts, alone and not self.scheduling.mixed)
        if key not in self._times:
            decodes = (count, count * self.context)
            if self.scheduling.mixed or not prompts:
                self._times[key] = self.step_ms(self._chunks(count, prompts), decodes)
            else:
                steps = max(1.0, prompts * self.prompt / self._budget(0))
                ms = steps * self.step_ms(self._chunks(0, max(1, round(prompts / steps))), (0, 0.0))
                self._times[key] = ms + (0.0 if key[2] else self.step_ms([], decodes))
        return self._times[key]

    def _chunks(self, count: int, prompts: int) -> list[tuple[int, int]]:
        """(new tokens, tokens before them); of a prompt longer than a step a piece from its middle."""
        budget = self._budget(count)
        return [(min(self.prompt, budget), self.cached + max(0, self.prompt - budget) // 2)] * prompts


def _moments(times: _Times) -> tuple[float, float]:
    """Mean and mean square."""
    return sum([chance * ms for chance, ms in times]), sum([chance * ms * ms for chance, ms in times])


def _slowest(own: _Times, other: _Times, in_flight: int) -> _Times:
    """The largest of one time of `own` and `in_flight - 1` of `other`.

    Micro-batches of a pipeline cannot overtake each other: in one round each of them takes a step, and all wait for the
    slowest. What stages idle meanwhile is the pipeline's bubble.
    """
    found, shorter = [], 0.0
    for ms in sorted({ms for _, ms in (*own, *other)}):
        within = _probability_within(own, ms) * _probability_within(other, ms) ** (in_flight - 1)
        found.append((within - shorter, ms))
        shorter = within
    return found


def _probability_within(times: _Times, limit: float) -> float:
    return max(0.0, sum([chance for chance, ms in times if ms <= limit]))
