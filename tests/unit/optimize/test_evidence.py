"""Evidence from runs: ratios are paired, estimates know their error, goodput is the cost under objectives."""

from __future__ import annotations

import math

import pytest

from tokenmill.optimize.evidence import (
    Limits,
    compare_speed,
    estimate_cost,
    ratio_noise,
    short_text_refusal,
    with_goodput,
)
from tokenmill.optimize.results import Latency, Percentiles, Quality, Run


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


def test_noise_is_pooled_and_an_estimate_knows_its_error() -> None:
    noisy = ratio_noise([[1.0, 1.1, 0.9, 1.05]] * 10)
    quiet = ratio_noise([[1.0, 1.001, 0.999, 1.0]] * 10)
    assert noisy > 0.05 > quiet
    once, often = estimate_cost([0.5], noisy), estimate_cost([0.5] * 16, noisy)
    assert often.error == pytest.approx(once.error / 4)
    assert once.low < often.low < math.log(0.5) < often.high < once.high


def test_one_outlier_among_many_does_not_move_an_estimate() -> None:
    assert estimate_cost([0.5, 0.51, 0.49, 0.5, 0.505, 5.0], 0.01).log_cost == pytest.approx(math.log(0.5), abs=0.02)


def test_goodput_is_the_cost_where_it_differs() -> None:
    speed = compare_speed(_runs(100, 100, 100), _runs(200, 200, 200))
    assert with_goodput(speed, _latency(50), _latency(51)).cost_ratio == pytest.approx(0.5)
    assert with_goodput(speed, _latency(50), _latency(200)).cost_ratio == pytest.approx(0.25)
    assert with_goodput(speed, _latency(0), _latency(200)).cost_ratio == pytest.approx(0.5)


def _latency(goodput: float) -> Latency:
    times = Percentiles(1, 1, 1, 1, 1)
    return Latency(10, 0, 1.0, 10.0, times, times, times, goodput, goodput, 1.0, True)


def test_a_short_text_refuses_only_what_is_far_off() -> None:
    limits = Limits(0.01)
    assert short_text_refusal(_quality(loss=0.02, low=-0.01, kld=0.01), limits) == ""
    assert "at least" in short_text_refusal(_quality(loss=0.05, low=0.02, kld=0.01), limits)
    assert "divergence" in short_text_refusal(_quality(loss=0.0, low=-0.01, kld=0.05), limits)


def _quality(loss: float, low: float, kld: float) -> Quality:
    return Quality(loss, low, 2 * loss - low, kld, 3 * kld, 0.9, 10.0, 10.0, 100, 0, 0.01)
