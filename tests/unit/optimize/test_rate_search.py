"""The search for the highest rate that keeps the objectives, against servers whose capacity is known."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from tokenmill.optimize.arrivals import Arrivals
from tokenmill.optimize.objectives import Objectives
from tokenmill.optimize.rate_search import find_rate
from tokenmill.optimize.results import Latency, Percentiles

_OBJECTIVES = Objectives.parse(["p95=500ms"], [])


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Queue:
    """A single server in time of its own: requests wait in line, each takes 1/capacity seconds."""

    def __init__(self, clock: _Clock, capacity: float, limit_s: float = 0.5) -> None:
        self.clock = clock
        self.capacity = capacity
        self.limit_s = limit_s
        self.rates: list[float] = []
        self.first_prompts: list[object] = []

    def __call__(self, arrivals: Arrivals, seconds: float) -> Latency:
        free, waits = 0.0, []
        for time in arrivals.times_s:
            free = max(free, time) + 1 / self.capacity
            waits.append(free - time)
        self.clock.now += min(seconds, free)
        self.rates.append(arrivals.requests_s)
        self.first_prompts.append(tuple(arrivals.prompts[0]))
        met = sorted(waits)[int(0.95 * len(waits)) - 1] <= self.limit_s
        none = Percentiles(0, 0, 0, 0, 0)
        rate = min(arrivals.requests_s, self.capacity)
        return Latency(len(waits), 0, arrivals.requests_s, free, none, none, none, rate, rate * met, float(met), met)


def _arrivals(rate: float) -> Arrivals:
    return Arrivals.poisson([[number] for number in range(60)], [1] * 60, rate, vocab_size=1000)


@pytest.mark.parametrize("capacity", [0.5, 3.0, 10.0, 70.0])
def test_the_sustained_rate_is_near_the_capacity_wherever_the_search_starts(capacity: float) -> None:
    clock = _Clock()
    server = _Queue(clock, capacity, limit_s=3 / capacity)
    scale, _, latency = find_rate(server, _arrivals(8.0), _OBJECTIVES, seconds=4000, clock=clock)
    assert latency.objective_met
    assert 0.4 * capacity < latency.goodput_tok_s <= capacity
    assert scale * 8 == pytest.approx(latency.goodput_tok_s, rel=0.3)
    higher = [rate for rate in server.rates if rate > 1.02 * latency.offered_requests_s]
    assert higher, "a higher rate was tried and missed"


def test_two_searches_find_the_same() -> None:
    found = []
    for _ in range(2):
        clock = _Clock()
        found.append(find_rate(_Queue(clock, 5.0), _arrivals(8.0), _OBJECTIVES, seconds=1000, clock=clock))
    assert found[0] == found[1]


def test_nothing_holds_and_everything_holds() -> None:
    clock = _Clock()
    scale, _, latency = find_rate(
        _Queue(clock, 5.0, limit_s=0.0), _arrivals(8.0), _OBJECTIVES, seconds=500, clock=clock
    )
    assert scale == 0
    assert not latency.objective_met
    clock = _Clock()
    server = _Queue(clock, 1e9)
    scale, _, latency = find_rate(server, _arrivals(8.0), _OBJECTIVES, seconds=500, clock=clock)
    assert latency.objective_met
    assert scale > 100
    assert len(server.rates) <= 12


def test_the_time_budget_bounds_the_search() -> None:
    for budget in (5.0, 30.0, 300.0):
        clock = _Clock()
        find_rate(_Queue(clock, 6.0), _arrivals(8.0), _OBJECTIVES, seconds=budget, clock=clock)
        assert clock.now <= budget + 3 * max(2.0, budget / 8)


def test_no_replay_repeats_the_tokens_of_another() -> None:
    clock = _Clock()
    server = _Queue(clock, 5.0)
    find_rate(server, _arrivals(8.0), _OBJECTIVES, seconds=1000, clock=clock)
    assert len(set(server.first_prompts)) == len(server.first_prompts) > 3


def test_a_noisy_server_still_ends_within_the_probes() -> None:
    random = Random(1)
    clock = _Clock()
    server = _Queue(clock, 5.0)

    def noisy(arrivals: Arrivals, seconds: float) -> Latency:
        server.capacity = 5.0 * random.uniform(0.8, 1.2)
        return server(arrivals, seconds)

    probe: Callable[[Arrivals, float], Latency] = noisy
    scale, _, latency = find_rate(probe, _arrivals(8.0), _OBJECTIVES, seconds=1000, clock=clock)
    assert 0.1 < scale < 1.0
    assert latency.objective_met


def test_a_probe_lasts_several_answers() -> None:
    durations = []
    for answer in (0.0, 3.0):
        clock = _Clock()
        server = _Queue(clock, 5.0)

        def probe(arrivals: Arrivals, seconds: float, server: _Queue = server) -> Latency:
            durations.append(arrivals.duration_s)
            return server(arrivals, seconds)

        find_rate(probe, _arrivals(8.0), _OBJECTIVES, seconds=40, answer_s=answer, clock=clock, start=0.5)
    assert durations[0] == pytest.approx(5, rel=0.2)
    assert max(durations) == pytest.approx(9, rel=0.2)
