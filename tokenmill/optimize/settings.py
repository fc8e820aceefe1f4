"""KV dtypes, batch sizes, caching, tiers and drafters on top of proven weights, best first.

Every change is timed on the leader; those that may pay are combined with each other and with the other proven weights,
the combinations in the order of their estimated cost. A combination is measured and proven as a whole: weights and KV
share one limit, and losses that were proven apart are never added up. Called by the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product, zip_longest

from tokenmill.optimize.candidates import Candidate, candidate_of
from tokenmill.optimize.evidence import CostEstimate
from tokenmill.optimize.results import SLOWER, CandidateResult
from tokenmill.optimize.space import Space
from tokenmill.optimize.trial import Trials

Change = tuple[Candidate, CostEstimate]  # the leader with one change, and what that does to the cost
_COMBINATIONS = 24  # measured at most, the cheapest by their estimate
_DIMENSIONS = ("kv", "batch_tokens", "options", "speculate")


@dataclass(slots=True)
class SettingsRound:
    trials: Trials
    space: Space
    baseline: CandidateResult
    add: Callable[[Candidate, CandidateResult], CandidateResult]  # a candidate, and the one it has the weights of
    deadline: float  # share of the time
    say: Callable[[str], None]
    drafts_pay: bool = True  # prompts are text: acceptance on random tokens says nothing about real ones
    unproven: list[CandidateResult] = field(default_factory=list)

    def run(self, proven: list[CandidateResult], others: list[CandidateResult]) -> list[CandidateResult]:
        """The combinations that may be the cheapest and keep the quality. `others`: weights that were timed and not
        refused; with another KV dtype one of them may be the cheapest that stays within the limit."""
        leader = proven[0]
        gains: dict[str, dict[str, Change]] = {name: {} for name in _DIMENSIONS}
        found: list[CandidateResult] = []
        for dimension, candidate in self._changes(leader):
            result = self.add(candidate, leader)
            if not self._look(result):
                continue
            gain = self.trials.estimate(result).minus(self.trials.estimate(leader))
            if gain.low < 0:
                gains[dimension][result.name] = candidate_of(result), gain
                found.append(result)
            else:
                result.verdict, result.reason = SLOWER, f"no cheaper than {leader.name}"
        found += self._combine(proven, others, gains)
        return self._prove(found, proven)

    def _changes(self, leader: CandidateResult) -> list[tuple[str, Candidate]]:
        """One change each, the most promising of every dimension first."""
        base, space = candidate_of(leader), self.space
        drafters = space.drafters if self.drafts_pay else []
        dimensions: dict[str, list[Candidate]] = {
            "kv": [replace(base, kv=each.name) for each in space.kv if each.name != base.kv],
            "batch_tokens": [
                replace(base, batch_tokens=each) for each in space.batch_tokens if each != base.batch_tokens
            ],
            "options": [replace(base, options={**base.options, **each}) for each in space.options],
            "speculate": [replace(base, speculate=each.speculate) for each in drafters],
        }
        turns = zip_longest(*([(name, each) for each in found] for name, found in dimensions.items()))
        return [change for turn in turns for change in turn if change is not None]

    def _look(self, result: CandidateResult) -> bool:
        trials = self.trials
        if self._is_late(result.name):
            result.reason, trials.out_of_time = "no time was left to try it", True
            return False
        self.say(f"trying {result.name}")
        limit = trials.budget.left_until(self.deadline)
        return trials.attempt(result, trials.look, self.baseline, result, limit, "variant")

    def _combine(
        self,
        proven: list[CandidateResult],
        others: list[CandidateResult],
        gains: dict[str, dict[str, Change]],
    ) -> list[CandidateResult]:
        """Weights with changes that may pay, other than one change on the leader: those are measured."""
        leader, trials = proven[0], self.trials
        choices: list[list[Change | None]] = [[None, *gains[name].values()] for name in _DIMENSIONS]
        estimated: list[tuple[float, Candidate, CandidateResult]] = []
        best = min(trials.estimate(each).high for each in proven)
        for weights, changes in product([*proven, *others], list(product(*choices))):
            made = [change for change in changes if change is not None]
            if not made or (weights is leader and len(made) == 1):
                continue
            cost, candidate = trials.estimate(weights), candidate_of(weights)
            for name, change in zip(_DIMENSIONS, changes, strict=True):
                if change is not None:
                    cost = cost.plus(change[1])
                    candidate = replace(candidate, **{name: getattr(change[0], name)})
            if cost.low < best:
                estimated.append((cost.log_cost, candidate, weights))
        looked = []
        for _, candidate, weights in sorted(estimated, key=lambda each: (each[0], each[1].name))[:_COMBINATIONS]:
            if self._is_late(candidate.name):
                trials.out_of_time = True
                break
            result = self.add(candidate, weights)
            if self._look(result):
                looked.append(result)
        return looked

    def _prove(self, found: list[CandidateResult], proven: list[CandidateResult]) -> list[CandidateResult]:
        """Cheapest first, as long as one may be cheaper than the cheapest that is proven."""
        trials, passed = self.trials, []
        best = min(trials.estimate(each).high for each in proven)
        for result in sorted(found, key=lambda each: (trials.estimate(each).log_cost, each.name)):
            if trials.estimate(result).low >= best:
                result.verdict, result.reason = SLOWER, "a cheaper one kept its quality"
            elif trials.budget.used > self.deadline and not trials.is_judged(result):
                result.reason, trials.out_of_time = "no time was left to prove its quality", True
                self.unproven.append(result)
            else:
                self.say(f"proving {result.name}")
                if trials.attempt(result, trials.accept, self.baseline, result):
                    passed.append(result)
                    best = min(best, trials.estimate(result).high)
        return passed

    def _is_late(self, name: str) -> bool:
        """Time is left for a proof: the cheapest of what is found here must not stay unproven."""
        trials = self.trials
        return trials.budget.left_until(self.deadline) <= trials.proof_seconds and not trials.is_looked_at(name)
