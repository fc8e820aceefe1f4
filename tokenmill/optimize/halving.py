"""Successive halving before the final: those in question are timed again until few enough are left to race.

Who is surely dearer than another by the runs so far drops out. Knows neither qualities nor rounds. Called by the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.optimize.results import FAILED, PASSED, CandidateResult
from tokenmill.optimize.trial import Trials

_MAX_REPEATS = 64


@dataclass(frozen=True, slots=True)
class Halving:
    trials: Trials
    most: int  # that race in the final
    deadline: float  # share of the time
    repeats: int  # at most, each of two runs
    say: Callable[[str], None]

    def narrow(self, baseline: CandidateResult, proven: list[CandidateResult]) -> list[CandidateResult]:
        trials, most = self.trials, self.most
        left = self.in_question(proven)
        for repeat in range(1, min(_MAX_REPEATS, self.repeats) + 1):
            late = trials.budget.used > self.deadline and not trials.store.recall("narrowed", str(repeat))
            if len(left) <= most or late:
                break
            self.say(f"timing {len(left)} again")
            for result in left:
                trials.attempt(result, trials.time_again, baseline, result, f"again {repeat}")
            trials.store.remember("narrowed", str(repeat), True)
            left = self.in_question([each for each in left if each.verdict != FAILED])
        for result in proven:
            if result not in left[:most] and result.verdict == PASSED:
                result.reason = "costs more by the runs before the final"
        return left[:most]

    def in_question(self, results: list[CandidateResult]) -> list[CandidateResult]:
        """Cheapest first, without those that are surely dearer than another."""
        estimates = {each.name: self.trials.estimate(each) for each in results}
        best = min((each.high for each in estimates.values()), default=0.0)
        likely = [each for each in results if estimates[each.name].low <= best]
        return sorted(likely, key=lambda each: (estimates[each.name].log_cost, each.name))
