"""Candidates that are not worth a measurement, judged by what was measured so far: far slower, or rounded too coarsely.

What was set aside comes back when those that it was set aside for do not pass. Corrects the predictions by the first
measurements. Measures nothing itself. Called by the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tokenmill.optimize.evidence import Limits, short_text_kld_limit
from tokenmill.optimize.results import PASSED, UNTRIED, CandidateResult, Prediction

_SETTLED_BY = 3  # measured candidates, after which predictions stay as they are
_HOPEFUL = 3  # candidates that must be measured before a slow prediction rules out another
_FAR_AHEAD = 1.25  # a prediction behind another by more than this is not worth a measurement
_SLOW, _COARSE = "slow", "coarse"
_BETTER_ROUNDING = 3.0  # divergence over that of the best method with as many bits


class Predicts(Protocol):
    """See predict.Predictor."""

    def predict(self, weights: str) -> Prediction: ...

    def settle(self, baseline: str, speedups: Mapping[str, float]) -> None: ...


@dataclass(slots=True)
class Pruning:
    results: dict[str, CandidateResult]
    predictor: Predicts | None
    limits: Limits
    predicted_as: Callable[[str], str]  # the weights whose prediction stands for a candidate's
    too_slow: set[str] = field(default_factory=set)  # names that were set aside for faster ones, which may not pass
    too_coarse: set[str] = field(default_factory=set)  # names with too few bits, by what others lost
    _reopened: set[tuple[str, str]] = field(default_factory=set)  # (name, why): not set aside for that again

    def settle(self, baseline: CandidateResult, measured: list[CandidateResult]) -> None:
        """Predict again with what the first measurements say about the time beside matrix products."""
        speedups = {self.predicted_as(each.name): 1 / each.speed.cost_ratio for each in measured if each.speed}
        if self.predictor is None or not speedups or len(measured) > _SETTLED_BY:
            return
        self.predictor.settle(baseline.weights, speedups)
        for name, result in self.results.items():
            if result.prediction is not None:
                result.prediction = self.predictor.predict(self.predicted_as(name))

    def hopeless(self, result: CandidateResult, measured: list[CandidateResult]) -> str:
        """Why measurements so far leave it no chance; empty if they leave one."""
        name = result.name
        if (name, _SLOW) not in self._reopened and (reason := self._slow(result, measured)):
            self.too_slow.add(name)
            return reason
        if (name, _COARSE) not in self._reopened and (reason := self._coarse(result)):
            self.too_coarse.add(name)
            return reason
        return ""

    def _slow(self, result: CandidateResult, measured: list[CandidateResult]) -> str:
        """The prediction is far behind one that may pass."""
        hopeful = [each for each in measured if each.prediction and each.verdict in (UNTRIED, PASSED)]
        if result.prediction is None or len(hopeful) < _HOPEFUL:
            return ""
        best = max(hopeful, key=lambda each: (each.prediction.speedup if each.prediction else 0.0, each.name))
        assert best.prediction is not None
        if best.prediction.speedup <= _FAR_AHEAD * result.prediction.speedup:
            return ""
        return f"predicted at {result.prediction.speedup:.2f} x, {best.name} at {best.prediction.speedup:.2f} x"

    def _coarse(self, result: CandidateResult) -> str:
        """One bit halves the steps of rounding: a quarter of the variance, and of the divergence."""
        own, most = result.prediction, _BETTER_ROUNDING * short_text_kld_limit(self.limits)
        for other in self.results.values():
            theirs, found = other.prediction, other.divergence
            if own is None or theirs is None or found is None or not own.bits or not theirs.bits:
                continue
            if found.kld_mean > most and own.bits < theirs.bits + math.log(found.kld_mean / most, 4):
                lost = f"{other.name} diverges by {found.kld_mean:.3g} with {theirs.bits:.3g} bits"
                return f"{lost} a weight, this has {own.bits:.3g}"
        return ""

    def reopen(self, proven: list[CandidateResult]) -> list[str]:
        """Names of those that were set aside for others which then did not pass, the fastest first."""
        ahead = max((each.prediction.speedup for each in proven if each.prediction), default=0.0)
        names = []
        for name in sorted(self.too_slow if proven else self.too_slow | self.too_coarse):
            prediction = self.results[name].prediction
            if prediction is not None and prediction.speedup * _FAR_AHEAD >= ahead:
                self.results[name].verdict, self.results[name].reason = UNTRIED, ""
                names.append((-prediction.speedup, name))
        found = [name for _, name in sorted(names)]
        for why, names_aside in ((_SLOW, self.too_slow), (_COARSE, self.too_coarse)):
            self._reopened |= {(name, why) for name in names_aside.intersection(found)}
            names_aside.difference_update(found)
        return found
