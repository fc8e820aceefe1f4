"""The final: proven candidates and the baseline run in turns until the cheapest is known to within one percent.

Cycles go on while a contender may still be more than a percent cheaper than the leader; who is surely dearer drops out.
Those that run the same kernels on as many bytes cost the same by construction and are not told apart by runs. Cost
decides; quality and name decide between equals, so that a repeated run chooses alike. Called by the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenmill.optimize.budget import TimeBudget
from tokenmill.optimize.evidence import TIE_MARGIN, CostEstimate, cost_ratios, estimate_cost, ratio_noise
from tokenmill.optimize.laboratory import Laboratory
from tokenmill.optimize.results import CandidateResult, Run

_FIRST_CYCLES = 3  # before anything is decided, however little time there is
_RESOLUTION = math.log(1 - TIE_MARGIN)


@dataclass(slots=True)
class Race:
    """`runs`: of every contender by name, one per cycle until it dropped out; those of the baseline under ""."""

    lab: Laboratory
    budget: TimeBudget
    baseline: CandidateResult
    contenders: list[CandidateResult]
    cycles: int  # at least, with the baseline
    most_cycles: int
    say: Callable[[int, int], None]
    runs: dict[str, list[Run]] = field(default_factory=dict)
    out_of_time: bool = False
    _alive: list[CandidateResult] = field(default_factory=list)

    def run(self) -> None:
        self.runs = {"": [], **{each.name: [] for each in self.contenders}}
        self._alive = list(self.contenders)
        for number in range(self.most_cycles):
            if number >= self.cycles and self._is_resolved():
                return
            entrants = [self.baseline, *self._alive] if number < self.cycles else list(self._alive)
            if number >= _FIRST_CYCLES and self.budget.used >= 1 and not self.lab.has_cycle(entrants, number):
                self.out_of_time = True
                return
            self.say(number, self.cycles)
            with self.budget.timed("cycle"):
                runs = self.lab.cycle(entrants, number)
            for entrant, run in zip(entrants, runs, strict=True):
                self.runs["" if entrant is self.baseline else entrant.name].append(run)
            if number + 1 >= _FIRST_CYCLES:
                self._drop_the_dear()

    def winner(self) -> tuple[CandidateResult, list[str]]:
        """(the choice, the names of those that cost the same, the choice included)."""
        leader = self._leader()
        tied = [each for each in self._alive if each is leader or self._is_tied(leader, each)]
        chosen = min(tied, key=lambda each: (each.quality.kld_mean if each.quality else 0.0, each.name))
        return chosen, sorted(each.name for each in tied)

    def _leader(self) -> CandidateResult:
        """All that are alive ran in every cycle: their throughputs can be compared as they are."""

        def log_cost(each: CandidateResult) -> float:
            return -math.fsum(math.log(run.total_tok_s) for run in self.runs[each.name])

        return min(self._alive, key=lambda each: (log_cost(each), each.name))

    def _against(self, leader: CandidateResult, other: CandidateResult) -> CostEstimate:
        """Cost of `other` over the leader's."""
        ratios = self._ratios(leader, other)
        return estimate_cost(ratios, self._noise())

    def _ratios(self, leader: CandidateResult, other: CandidateResult) -> list[float]:
        return [float(each) for each in cost_ratios(self.runs[leader.name], self.runs[other.name])]

    def _noise(self) -> float:
        leader = self._leader()
        return ratio_noise(self._ratios(leader, each) for each in self._alive if each is not leader)

    def _is_resolved(self) -> bool:
        leader = self._leader()
        others = [each for each in self._alive if each is not leader and not _same_speed(leader, each)]
        return all(self._against(leader, each).low >= _RESOLUTION for each in others)

    def _drop_the_dear(self) -> None:
        leader = self._leader()
        self._alive = [
            each
            for each in self._alive
            if each is leader or _same_speed(leader, each) or self._against(leader, each).low <= 0
        ]

    def _is_tied(self, leader: CandidateResult, other: CandidateResult) -> bool:
        if _same_speed(leader, other):
            return True
        ratio = self._against(leader, other)
        if self.out_of_time:  # not told apart in the time given
            return ratio.log_cost <= TIE_MARGIN
        return ratio.high <= TIE_MARGIN


def _same_speed(one: CandidateResult, other: CandidateResult) -> bool:
    first, second = one.prediction, other.prediction
    if first is None or second is None or not first.speed_class:
        return False
    return first.speed_class == second.speed_class and _settings(one) == _settings(other)


def _settings(result: CandidateResult) -> Sequence[object]:
    return (result.kv, result.batch_tokens, result.speculate, sorted(result.options.items()))
