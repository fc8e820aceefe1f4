"""Two models on the same items: known intervals, and the rule of what is refused, what is noted and what passes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tokenmill.evaluate.task_pairs import PairedTask, adjusted_loss, judge_loss, pair_task


def _pair(n: int, worse: int, better: int) -> PairedTask:
    """Items of which the reference gets the first half right."""
    reference = np.array([1.0] * (n // 2) + [0.0] * (n - n // 2))
    model = reference.copy()
    model[:worse] = 0.0
    model[n - better :] = 1.0
    return pair_task("quiz", reference.tolist(), model.tolist())


def test_the_figures_of_a_pair() -> None:
    pair = _pair(100, worse=9, better=1)
    assert (pair.accuracy, pair.reference_accuracy) == (pytest.approx(0.42), pytest.approx(0.5))
    assert pair.difference == pytest.approx(-0.08)
    assert pair.low < -0.08 < pair.high < 0
    assert pair.p_value == pytest.approx(0.021484375)  # scipy.stats.binomtest(1, 10, 0.5)
    assert (pair.better, pair.worse, pair.n) == (1, 9, 100)


def test_the_interval_of_agresti_and_min() -> None:
    """Half an item more in each cell, worked out by hand for 100 items, 9 worse and 1 better."""
    loss = _pair(100, worse=9, better=1).loss
    assert loss.value == pytest.approx(8 / 102)
    assert loss.stderr == pytest.approx(math.sqrt(11 - 64 / 102) / 102)
    nothing = adjusted_loss(np.zeros(10))
    assert (nothing.value, nothing.stderr) == (0.0, pytest.approx(1 / 12))  # ten agreements prove little


def test_a_loss_shown_to_exceed_the_limit_is_refused_with_any_number_of_items() -> None:
    verdict = judge_loss(_pair(40, worse=18, better=0), 0.02)
    assert "accuracy on quiz is 5.0% against 50.0%" in verdict.refusal
    assert "more than 2.0%" in verdict.refusal


def test_few_items_refuse_only_what_they_show() -> None:
    verdict = judge_loss(_pair(30, worse=1, better=0), 0.02)
    assert verdict.refusal == ""
    assert "30 items are too few to tell" in verdict.note
    assert "too few" in judge_loss(_pair(30, worse=1, better=0), 0.02, refuse_unproven=True).refusal
    assert judge_loss(_pair(10, worse=0, better=0), 0.02).note  # nothing differs, and nothing is shown


def test_enough_items_must_show_that_the_loss_is_within() -> None:
    assert judge_loss(_pair(1000, worse=12, better=12), 0.02) == judge_loss(_pair(1000, worse=0, better=0), 0.02)
    verdict = judge_loss(_pair(1000, worse=30, better=14), 0.02)  # 1.6 % lost, up to 2.7 %
    assert "is not shown to be within" in verdict.refusal
    assert not judge_loss(_pair(1000, worse=30, better=14), 0.03).refusal


def test_shares_are_paired_too() -> None:
    pair = pair_task("shares", [0.5, 0.25, 1.0, 0.75], [0.25, 0.25, 0.5, 0.75])
    assert pair.p_value == pytest.approx(0.5)  # two worse, none better
    assert pair.difference == pytest.approx(-0.1875)
