"""A task by two models, paired by item: the difference of accuracies, and whether a loss is within a limit.

The rule of `judge_loss`: refused where the loss is shown to exceed the limit (the lower end of its one-sided interval
does); refused too where it cannot be shown to be within (the upper end exceeds it). A file with too few items to show
even no loss at all to be within is said to be so, and refuses only what is shown, unless the caller wants otherwise.
Called by `tokenmill eval task --reference` and by `optimize`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenmill.evaluate.statistics import Estimate, bootstrap_interval, mcnemar_exact

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class PairedTask:
    """The model's metric beside the reference's on the same items. A loss is reference - model."""

    name: str
    n: int
    accuracy: float
    reference_accuracy: float
    difference: float  # accuracy - reference_accuracy
    low: float  # two-sided 95 % interval of the difference: bootstrap over items
    high: float
    p_value: float  # McNemar's exact test; of shares, the exact sign test
    better: int  # items on which the model is better than the reference
    worse: int
    loss: Estimate  # as the limit is held against it, see `adjusted_loss`


@dataclass(frozen=True, slots=True)
class LossVerdict:
    refusal: str = ""
    note: str = ""  # what the items cannot tell


def pair_task(name: str, reference: Sequence[float], model: Sequence[float]) -> PairedTask:
    a, b = np.asarray(reference, dtype=np.float64), np.asarray(model, dtype=np.float64)
    assert a.shape == b.shape, "results that are not paired"
    low, high = bootstrap_interval(b - a)
    better, worse = int((b > a).sum()), int((b < a).sum())
    return PairedTask(
        name=name,
        n=len(a),
        accuracy=float(b.mean()),
        reference_accuracy=float(a.mean()),
        difference=float((b - a).mean()),
        low=low,
        high=high,
        p_value=mcnemar_exact(worse, better),
        better=better,
        worse=worse,
        loss=adjusted_loss(a - b),
    )


def adjusted_loss(losses: np.ndarray) -> Estimate:
    """The mean of paired losses by Agresti and Min: half an item is added to each cell of the table of both models.

    Without it, a few items on which both models agree would prove that no item ever differs.
    """
    n = len(losses) + 2
    total, squares = float(losses.sum()), float((losses**2).sum()) + 1
    return Estimate(total / n, math.sqrt(max(0.0, squares - total**2 / n)) / n)


def judge_loss(pair: PairedTask, limit: float, refuse_unproven: bool = False) -> LossVerdict:
    """`limit`: of the accuracy lost, 0.02 is two items of a hundred. `refuse_unproven`: with too few too."""
    lower, upper = pair.loss.lower(CONFIDENCE), pair.loss.upper(CONFIDENCE)
    margin = upper - pair.loss.value
    measured = f"accuracy on {pair.name} is {pair.accuracy:.1%} against {pair.reference_accuracy:.1%}"
    if lower > limit:
        return LossVerdict(
            f"{measured}: it falls by {-pair.difference:.1%} (at least {lower:.1%} with {CONFIDENCE:.0%} confidence, "
            f"McNemar p = {pair.p_value:.2g}), more than {limit:.1%}"
        )
    if upper <= limit:
        return LossVerdict()
    too_few = margin > limit
    needed = math.ceil(pair.n * (margin / max(limit, 1e-3)) ** 2)
    words = f"{measured}: the loss may be {upper:.1%} ({CONFIDENCE:.0%} confidence), more than {limit:.1%}"
    if not too_few:
        return LossVerdict(f"{words}, and is not shown to be within")
    words = f"{words}: {pair.n} items are too few to tell, about {needed} would"
    return LossVerdict(words) if refuse_unproven else LossVerdict(note=words)
