"""Evidence from runs: ratios are paired, halving keeps the cheap and the uncertain, ties go to the better quality."""

from __future__ import annotations

import pytest

from tokenmill.optimize.evidence import choose, compare_speed, is_tied, survivors
from tokenmill.optimize.results import Run


def _runs(*rates: float) -> list[Run]:
    return [Run(1.0, rate / 2, rate, 100.0, 10.0) for rate in rates]


def test_a_slow_minute_of_the_machine_does_not_show() -> None:
    """Both halve their speed in two of five cycles: the ratio of each cycle stays."""
    speed = compare_speed(_runs(100, 100, 50, 50, 100), _runs(250, 250, 125, 125, 250))
    assert speed.cost_ratio == pytest.approx(0.4)
    assert (speed.low, speed.high) == (pytest.approx(0.4), pytest.approx(0.4))
    assert speed.cost_reduction == pytest.approx(0.6)
    assert speed.runs == 5


def test_the_interval_covers_the_spread_and_the_median_ignores_one_outlier() -> None:
    speed = compare_speed(_runs(100, 100, 100, 100, 100), _runs(200, 210, 190, 205, 20))
    assert speed.cost_ratio == pytest.approx(0.5)
    assert speed.low < 0.5 < speed.high


def test_halving_keeps_the_cheaper_half_and_the_near() -> None:
    costs = {"a": 0.30, "b": 0.40, "c": 0.41, "d": 0.60, "e": 0.90}
    assert survivors(costs, at_least=2) == ["a", "b", "c"]
    assert survivors({"a": 0.3, "b": 0.4, "c": 0.41, "d": 0.9}, at_least=2) == ["a", "b", "c"]  # c is within noise of b
    assert survivors({"a": 0.3}, at_least=2) == ["a"]
    assert survivors({}) == []


def test_tied_candidates_are_named_and_the_better_one_wins() -> None:
    runs = {"fast": _runs(300, 302, 298), "near": _runs(299, 301, 299), "slow": _runs(200, 201, 199)}
    winner, tied = choose(runs, {"fast": 0.02, "near": 0.001, "slow": 0.0})
    assert winner == "near"
    assert tied == ["fast", "near"]
    assert not is_tied(runs["fast"], runs["slow"])


def test_equal_quality_is_decided_by_name_so_that_the_choice_repeats() -> None:
    runs = {"b": _runs(300, 300, 300), "a": _runs(300, 300, 300)}
    assert choose(runs, {"a": 0.0, "b": 0.0})[0] == "a"
