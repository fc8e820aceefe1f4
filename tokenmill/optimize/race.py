"""The final: proven candidates and the baseline run in turns until the cheapest is known to within one percent.

Cycles go on, up to a maximum, while a contender may still be more than a percent cheaper than the leader; who is surely
dearer drops out. What the last cycle leaves open is stated (`margin`).
Those that run the same kernels on as many bytes cost the same by construction and are not told apart by runs. Cost
decides; quality and name decide between equals, so that a repeated run chooses alike. Called by the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tokenmill.optimize.budget import TimeBudget
from tokenmill.optimize.evidence import CostEstimate, estimate_cost, ratio_noise
from tokenmill.optimize.laboratory import Laboratory
from tokenmill.optimize.results import FAILED, TIE_MARGIN, CandidateResult, Run

_FIRST_CYCLES = 3  # before anything is decided, however little time there is
_OFTEN, _SELDOM = 20, 8  # decisions after every cycle at first, then after every eighth
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
    fail: Callable[[CandidateResult, Exception], None]  # called with a contender that ended a cycle by failing
    runs: dict[str, list[Run]] = field(default_factory=dict)
    out_of_time: bool = False
    resolved: bool = False  # the leader costs at most a percent more than any other
    _alive: list[CandidateResult] = field(default_factory=list)

    def run(self) -> None:
        self.runs = {"": [], **{each.name: [] for each in self.contenders}}
        self._alive = list(self.contenders)
        for number in range(self.most_cycles):
            looks = number < _OFTEN or number % _SELDOM == 0  # many cycles change little
            self.resolved = number >= self.cycles and looks and self._is_resolved()
            if self.resolved:
                return
            entrants = [self.baseline, *self._alive] if number < self.cycles else list(self._alive)
            if number >= _FIRST_CYCLES and self.budget.used >= 1 and not self.lab.has_cycle(entrants, number):
                self.out_of_time = True
                return
            self.say(number, self.cycles)
            entrants, runs = self._cycle(entrants, number)
            if not self._alive:
                return
            for entrant, run in zip(entrants, runs, strict=True):
                self.runs["" if entrant is self.baseline else entrant.name].append(run)
            if number + 1 >= _FIRST_CYCLES and looks and len(self._alive) > 1:
                self._drop_the_dear()

    def _cycle(self, entrants: list[CandidateResult], number: int) -> tuple[list[CandidateResult], list[Run]]:
        """(those that ran, their runs): a contender that fails is left out, and the cycle runs again without it."""
        while True:
            try:
                with self.budget.timed("cycle"):
                    return entrants, self.lab.cycle(entrants, number)
            except Exception as error:  # any exception: a registered method or store may be third-party code
                name = getattr(error, "candidate", self._alive[0].name if len(self._alive) == 1 else "")
                failed = next((each for each in self._alive if each.name == name), None)
                if failed is None:  # the baseline, or the laboratory itself
                    raise
                self.fail(failed, error)
                self._alive.remove(failed)
                entrants = [each for each in entrants if each is not failed]
                if not self._alive:
                    return [], []

    @property
    def finished(self) -> list[CandidateResult]:
        """Those that ran and did not fail."""
        return [each for each in self.contenders if self.runs[each.name] and each.verdict != FAILED]

    def winner(self) -> tuple[CandidateResult, list[str]]:
        """(the choice, the names of those that cost the same, the choice included)."""
        leader, others = self._standings()
        tied = [leader, *(each for each, ratio in others if self._is_tied(leader, each, ratio))]
        chosen = min(tied, key=lambda each: (each.quality.kld_mean if each.quality else 0.0, each.name))
        return chosen, sorted(each.name for each in tied)

    def margin(self, chosen: CandidateResult) -> float:
        """Share of its cost by which another may still be cheaper, at most. Those that dropped out are dearer."""
        open_to = [ratio.low for each, ratio in self._ratios(chosen) if not _same_speed(chosen, each)]
        return 1 - math.exp(min([0.0, *open_to]))

    def _standings(self) -> tuple[CandidateResult, list[tuple[CandidateResult, CostEstimate]]]:
        """(leader, the others with their cost over the leader's)."""
        leader = min(self._alive, key=lambda each: (-float(np.log(self._rates(each)).sum()), each.name))
        return leader, self._ratios(leader)

    def _ratios(self, reference: CandidateResult) -> list[tuple[CandidateResult, CostEstimate]]:
        """The others with their cost over the reference's. All that are alive ran in every cycle."""
        others = [each for each in self._alive if each is not reference]
        ratios = [self._rates(reference) / self._rates(each) for each in others]
        noise = ratio_noise(ratios)
        return [(each, estimate_cost(own, noise)) for each, own in zip(others, ratios, strict=True)]

    def _rates(self, result: CandidateResult) -> np.ndarray:
        return np.array([run.total_tok_s for run in self.runs[result.name]])

    def _is_resolved(self) -> bool:
        leader, others = self._standings()
        return all(_same_speed(leader, each) or ratio.low >= _RESOLUTION for each, ratio in others)

    def _drop_the_dear(self) -> None:
        leader, others = self._standings()
        near = [each for each, ratio in others if _same_speed(leader, each) or ratio.low <= 0]
        self._alive = [leader, *near]

    def _is_tied(self, leader: CandidateResult, other: CandidateResult, ratio: CostEstimate) -> bool:
        if _same_speed(leader, other):
            return True
        return (ratio.high if self.resolved else ratio.log_cost) <= TIE_MARGIN


def _same_speed(one: CandidateResult, other: CandidateResult) -> bool:
    first, second = one.prediction, other.prediction
    if first is None or second is None or not first.speed_class:
        return False
    return first.speed_class == second.speed_class and _settings(one) == _settings(other)


def _settings(result: CandidateResult) -> Sequence[object]:
    return (result.kv, result.batch_tokens, result.speculate, sorted(result.options.items()))
