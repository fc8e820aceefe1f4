"""Draft lengths by a clock of our own: gains are taken, losses avoided, changes noticed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation.costs import StepCosts
from tokenmill.runtime.speculation.length import DraftLengths
from tokenmill.types import Request, SamplingParams


def _request() -> Request:
    return Request("r", [1], SamplingParams())


def _draft(confidence: float, length: int) -> Draft:
    return Draft([0] * length, [confidence] * length)


def _flat(num_tokens: int) -> float:
    return 0.010 + 0.0002 * num_tokens


def _steep(num_tokens: int) -> float:
    return 0.002 + 0.008 * num_tokens


class _World:
    """Decodes with drafts that hold with a given probability, in steps with given costs."""

    def __init__(self, cost: Callable[[int], float], num_requests: int = 1) -> None:
        self.cost = cost
        self.lengths = DraftLengths()
        self.requests = [_request() for _ in range(num_requests)]
        self.random = random.Random(2)

    def run(self, steps: int, chance: float, confidence: float = 0.7, offered: int = 8) -> tuple[float, float]:
        """(time without drafts over time with, mean number of tokens drafted in a step)."""
        plain = spent = drafted = 0.0
        rows = len(self.requests)
        for _ in range(steps):
            lengths = self.lengths.choose(self.requests, [_draft(confidence, offered)] * rows, rows)
            accepted = []
            for length in lengths:
                held = 0
                while held < length and self.random.random() < chance:
                    held += 1
                accepted.append(held)
            seconds = self.cost(rows + sum(lengths))
            self.lengths.costs.record(rows + sum(lengths), seconds)
            drafts = [_draft(confidence, length) for length in lengths]
            self.lengths.learn(self.requests, drafts, [[0] * count for count in accepted])
            spent += seconds
            plain += self.cost(rows) * (rows + sum(accepted)) / rows
            drafted += sum(lengths)
        return plain / spent, drafted / steps


def test_good_drafts_are_used_in_full_where_tokens_are_cheap() -> None:
    gain, drafted = _World(_flat).run(300, chance=0.95)
    assert drafted > 7
    assert gain > 5


@pytest.mark.parametrize("cost", [_flat, _steep])
@pytest.mark.parametrize("num_requests", [1, 16])
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5])
def test_never_lose(cost: Callable[[int], float], num_requests: int, chance: float) -> None:
    """Whatever the drafter believes of itself."""
    for confidence in (0.1, 0.5, 0.95):
        gain, _ = _World(cost, num_requests).run(600, chance, confidence)
        assert gain > 0.97


def test_bad_drafts_cost_next_to_nothing_and_a_change_is_noticed() -> None:
    world = _World(_flat)
    world.run(500, chance=0.0)
    _, drafted = world.run(1000, chance=0.0)
    assert drafted < 0.02
    world.run(1500, chance=0.95)
    _, drafted = world.run(300, chance=0.95)
    assert drafted > 6


def test_load_shortens_drafts() -> None:
    """The same acceptance pays at one row and not at many, where every token costs the same."""

    def cost(num_tokens: int) -> float:
        return max(0.010, 0.001 * num_tokens)

    alone, _ = _World(cost).run(400, chance=0.7)
    crowd = _World(cost, 16)
    together, drafted = crowd.run(400, chance=0.7)
    assert alone > 1.5
    assert together > 0.99
    assert drafted / 16 < 0.05


def test_each_request_has_its_own_length() -> None:
    world = _World(lambda n: 0.010 + 0.003 * n, num_requests=2)
    good, bad = world.requests
    for _ in range(200):
        lengths = world.lengths.choose(world.requests, [_draft(0.6, 4)] * 2, 2)
        world.lengths.costs.record(2 + sum(lengths), world.cost(2 + sum(lengths)))
        drafts = [_draft(0.6, length) for length in lengths]
        world.lengths.learn([good, bad], drafts, [[0] * lengths[0], []])
    assert lengths[0] >= 3
    assert lengths[1] <= 1


def test_drafting_that_costs_time_is_not_done_in_vain() -> None:
    lengths, request = DraftLengths(), _request()
    for _ in range(50):
        lengths.costs.record(1, 0.010)
        lengths.costs.record(5, 0.011)
        lengths.learn([request], [_draft(0.5, 1)], [[0]])
    assert lengths.limits([request], [4], 1, seconds=0.001) == [4]
    assert lengths.limits([request], [4], 1, seconds=0.020) == [0]


@pytest.mark.parametrize(("chance", "used"), [(0.35, True), (0.6, True), (0.02, False)])
def test_whole_drafts_are_used_where_they_pay_and_a_run_of_failures_does_not_end_them(
    chance: float, used: bool
) -> None:
    """Steps of drafts that make the next ones: a fifth dearer, four tokens or none. Many short requests."""
    lengths, draw = DraftLengths(), random.Random(5)
    plain = spent = 0.0
    drafted = tokens = 0
    for _ in range(30):
        request = _request()
        for _ in range(100):
            takes = lengths.pays([request], 4, 1)
            held = 0
            while takes and held < 4 and draw.random() < chance:
                held += 1
            cost = 1.2 if takes else 1.0
            lengths.costs.record(5 if takes else 1, cost)
            if takes:
                lengths.learn([request], [_draft(0.5, 4)], [[0] * held])
            drafted += takes
            tokens += 1 + held
            plain += 1 + held
            spent += cost
    assert plain / spent > (1.2 if used else 0.97)
    assert (drafted > 2400) == used


def test_costs_are_interpolated_and_rise() -> None:
    costs = StepCosts()
    for _ in range(5):
        costs.record(1, 1.0)
        costs.record(5, 3.0)
    assert costs.seconds(3) == pytest.approx(2.0)
    assert costs.seconds(9) == pytest.approx(5.0)
    costs.record(4, 50.0)  # the machine was busy
    assert costs.seconds(4) == pytest.approx(3.0)


def test_a_single_disturbance_is_outvoted_and_old_measurements_go() -> None:
    costs = StepCosts()
    for seconds in (1.0, 1.1, 90.0, 1.0, 1.2):
        costs.record(2, seconds)
    assert costs.seconds(2) == pytest.approx(1.1)
    for _ in range(5000):
        costs.record(1, 1.0)
    assert not costs.is_known(2)
    assert costs.is_known(1)


def test_of_a_tree_only_what_was_tested_counts() -> None:
    lengths, request = DraftLengths(), _request()
    #      5 -> 7 (accepted), 5 -> 8;   6 -> 9 was never reached
    tree = Draft([5, 6, 7, 8, 9], [0.9, 0.1, 0.55, 0.3, 0.7], parents=[-1, -1, 0, 0, 1])
    before = lengths.acceptance.chance(request, 0.7)
    lengths.learn([request], [tree], [[5, 7]])
    assert lengths.acceptance.chance(request, 0.7) == before
    assert lengths.acceptance.chance(request, 0.9) > 0.9
    assert lengths.acceptance.chance(request, 0.55) > 0.55
    assert lengths.acceptance.chance(request, 0.1) < 0.1
    assert lengths.acceptance.chance(request, 0.3) < 0.3
