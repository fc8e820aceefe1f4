"""Error bars and paired tests against values worked out by hand or by SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tokenmill.evaluate.statistics import (
    Estimate,
    bootstrap_interval,
    compare_paired,
    exponential_of_mean,
    mcnemar_exact,
    mean,
)


def test_mean_has_the_standard_error_of_the_sample() -> None:
    assert mean([1.0, 2.0, 3.0]) == Estimate(2.0, pytest.approx(1 / math.sqrt(3)))
    assert mean([0.5]) == Estimate(0.5, 0.0)
    assert math.isnan(mean([]).value)


def test_perplexity_error_is_that_of_the_mean_times_the_perplexity() -> None:
    estimate = exponential_of_mean(np.array([1.0, 2.0, 3.0]))
    assert estimate.value == pytest.approx(math.exp(2))
    assert estimate.stderr == pytest.approx(math.exp(2) * math.sqrt((2 / 3) / 2))
    assert exponential_of_mean(np.array([1e4, 1e4])).value == math.inf


def test_intervals_of_a_normal_estimate() -> None:
    estimate = Estimate(1.0, 0.1)
    assert estimate.interval(0.95) == pytest.approx((0.804, 1.196), abs=1e-3)
    assert estimate.upper(0.95) == pytest.approx(1.1645, abs=1e-4)
    assert estimate.upper(0.5) == 1.0


@pytest.mark.parametrize(
    ("first", "second", "p"),
    # scipy.stats.binomtest(min, n, 0.5).pvalue
    [(0, 0, 1.0), (5, 5, 1.0), (1, 9, 0.021484375), (0, 6, 0.03125), (10, 25, 0.0166738478)],
)
def test_mcnemar(first: int, second: int, p: float) -> None:
    assert mcnemar_exact(first, second) == pytest.approx(p, rel=1e-6)
    assert mcnemar_exact(second, first) == mcnemar_exact(first, second)


def test_bootstrap_agrees_with_the_normal_interval_and_repeats_by_seed() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    low, high = bootstrap_interval(values, 0.95, 4000, seed=7)
    expected = mean(values).interval(0.95)
    assert (low, high) == pytest.approx(expected, abs=0.03)
    assert bootstrap_interval(values, 0.95, 4000, seed=7) == (low, high)
    assert bootstrap_interval(values, 0.95, 4000, seed=8) != (low, high)


def test_a_paired_comparison_sees_what_an_unpaired_one_cannot() -> None:
    first = np.array([0.0, 1.0] * 50)
    second = first.copy()
    second[[0, 2, 4, 6, 8, 10]] = 1.0  # six more are right, none is worse
    found = compare_paired(first, second)
    assert found.difference == pytest.approx(0.06)
    assert 0.01 < found.low < found.difference < found.high < 0.12
    assert found.p_value == pytest.approx(0.03125)
    assert found.n == 100
    assert compare_paired(second, first).difference == pytest.approx(-0.06)


def test_shares_have_no_mcnemar() -> None:
    assert compare_paired([0.25, 0.5], [0.5, 0.5]).p_value is None
