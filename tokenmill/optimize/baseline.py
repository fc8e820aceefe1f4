"""The baseline: the fastest configuration of the unquantized model, so that savings are not against a slow one.

The float type that is predicted to be fastest is measured, others only where the prediction says that they come near;
then float KV dtypes and batch sizes on the fastest, as long as its share of the time lasts. Called by the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tokenmill.errors import UserError
from tokenmill.optimize.candidates import Candidate
from tokenmill.optimize.evidence import compare_speed
from tokenmill.optimize.results import FAILED, PASSED, SLOWER, CandidateResult
from tokenmill.optimize.space import Space
from tokenmill.optimize.trial import Trials

_NEAR = 1.15  # predictions within this factor of the best are measured
_SHARE = 0.15  # of the time


@dataclass(slots=True)
class BaselineContest:
    trials: Trials
    space: Space
    speedup: Callable[[str], float]  # predicted, of float weights; all alike where nothing is predicted
    say: Callable[[str, float], None]
    tried: list[CandidateResult] = field(default_factory=list)
    leader: CandidateResult | None = None

    def run(self) -> CandidateResult:
        """The fastest; `tried` has all that were measured."""
        tokens = self.space.batch_tokens[0]
        for name in self._float_weights():
            self._contest(Candidate(name, self.space.default_kv, tokens))
        if self.leader is None:
            reason = self.tried[0].reason if self.tried else "there are no unquantized weights"
            raise UserError(f"no unquantized baseline runs here: {reason}", "free memory or disk")
        for kv in self.space.float_kv:
            if kv != self.leader.kv:
                self._contest(Candidate(self.leader.weights, kv, tokens))
        for size in self.space.batch_tokens[1:]:
            self._contest(Candidate(self.leader.weights, self.leader.kv, size))
        for result in self.tried:
            if result.verdict != FAILED:
                result.verdict = PASSED if result is self.leader else SLOWER
        return self.leader

    def _float_weights(self) -> list[str]:
        """Those worth measuring, the best guess first; 16 bits before 32 where nothing is predicted."""
        names = self.space.float_weights
        speeds = {name: self.speedup(name) for name in names}
        order = sorted(names, key=lambda name: (-speeds[name], name))
        return [name for name in order if speeds[name] * _NEAR >= speeds[order[0]]]

    def _contest(self, candidate: Candidate) -> None:
        store, result = self.trials.store, candidate.result()
        name = f"baseline {candidate.name}"
        kind = f"against {self.leader.name}" if self.leader else ""
        known = store.recall("failed", name) or store.recall("tried", name)
        if self.leader is not None and not known and self.trials.budget.used > _SHARE:
            return
        self.say(name, 0.02 + 0.02 * len(self.tried))
        self.tried.append(result)
        if not self.trials.attempt(result, self._measure, result, kind, name=name):
            return
        store.remember("tried", name, True)
        if self.leader is None or (result.speed is not None and result.speed.cost_ratio < 1):
            self.leader = result

    def _measure(self, result: CandidateResult, kind: str) -> bool:
        self.trials.build(result, float("inf"), "baseline")
        if self.leader is None:
            return True
        base, runs = self.trials.lab.pair(kind, self.leader, result)
        self.trials.add_repeats(f"{kind} {result.name}", base, runs)
        result.speed = compare_speed(base, runs)
        if self.leader.speed is None:
            self.leader.speed = compare_speed(base, base)
        result.reason = f"{1 / result.speed.cost_ratio:.2f} x the speed of {self.leader.name}"
        return True
