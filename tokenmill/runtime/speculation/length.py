"""How many drafted tokens a step takes: those that are expected to gain time, down to none.

Measured are how often drafts of a given confidence hold, for each request and for all (Acceptance), and what steps cost
(costs.py). Drafted tokens of all rows are then taken in the order of their chance to survive, as long as tokens per
second rise. While nothing pays, one token is tried now and then, ever more rarely, so that a change of text
or load is noticed at a price of well under one percent. Imports no torch. Called by the speculator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation.costs import StepCosts
from tokenmill.types import Request

_BUCKETS = 16  # of confidence
_GLOBAL_MEMORY = 0.98  # what a trial leaves of those before it
_REQUEST_MEMORY = 0.9
_LASTING_MEMORY = 0.97
_LASTING_TRIALS = 16.0
_PRIOR_TRIALS = 4.0  # how many trials the next more general estimate counts for
_WORTH = 1.02  # expected gain from which drafts are used: less is noise
_FIRST_GAP, _LONGEST_GAP = 64, 1024  # steps between two trials while nothing pays


@dataclass(slots=True)
class _Rate:
    """Trials and successes, fading."""

    held: float = 0.0
    tried: float = 0.0

    def record(self, held: bool, memory: float) -> None:
        self.held = self.held * memory + held
        self.tried = self.tried * memory + 1.0

    def estimate(self, prior: float, weight: float = _PRIOR_TRIALS) -> float:
        return (self.held + weight * prior) / (self.tried + weight)


@dataclass(slots=True)
class _RequestRates:
    by_confidence: list[_Rate] = field(default_factory=lambda: [_Rate() for _ in range(_BUCKETS)])
    overall: _Rate = field(default_factory=_Rate)
    lasting: _Rate = field(default_factory=_Rate)  # as overall, remembered longer


class Acceptance:
    """The chance that a drafted token holds, given that those before it did."""

    def __init__(self) -> None:
        self._everyone = _RequestRates()
        self._requests: WeakKeyDictionary[Request, _RequestRates] = WeakKeyDictionary()

    def record(self, request: Request, trials: Sequence[tuple[float, bool]]) -> None:
        """`trials`: the confidence of each token that was put to the test, and whether it held."""
        own = self._requests.setdefault(request, _RequestRates())
        for confidence, held in trials:
            bucket = _bucket(confidence)
            for rates, memory in ((self._everyone, _GLOBAL_MEMORY), (own, _REQUEST_MEMORY)):
                rates.by_confidence[bucket].record(held, memory)
                rates.overall.record(held, memory)
                rates.lasting.record(held, _LASTING_MEMORY)

    def chance(self, request: Request, confidence: float) -> float:
        bucket = _bucket(confidence)
        general = self._everyone.by_confidence[bucket].estimate(confidence)
        own = self._requests.get(request)
        return general if own is None else own.by_confidence[bucket].estimate(general)

    def overall(self, request: Request) -> float:
        """Before anything is drafted."""
        general = self._everyone.overall.estimate(0.6)
        own = self._requests.get(request)
        return general if own is None else own.overall.estimate(general)

    def lasting(self, request: Request) -> float:
        """As `overall`, where a few failures in a row must not decide: what is found wanting is not tried for long."""
        general = self._everyone.lasting.estimate(0.6)
        own = self._requests.get(request)
        return general if own is None else own.lasting.estimate(general, _LASTING_TRIALS)


class DraftLengths:
    def __init__(self) -> None:
        self.costs = StepCosts()
        self.acceptance = Acceptance()
        self._gap = _FIRST_GAP
        self._since_trial = 0
        self._trying = False
        self._pays = True

    @property
    def rests(self) -> bool:
        """Whether `pay` has said no and will probably say so the next time too. Where it does not, that step has no
        drafts yet, as their maker has not seen the one before."""
        return not self._pays and self._since_trial + 1 < self._gap

    def limits(self, requests: Sequence[Request], most: Sequence[int], num_tokens: int, seconds: float) -> list[int]:
        """Before drafting costs anything: how many tokens of each request to draft. `seconds`: of a drafted token, for
        all requests together. `num_tokens`: of the step without drafts."""
        chances = [self.acceptance.overall(request) for request in requests]
        plans = [[chance ** (depth + 1) for depth in range(limit)] for chance, limit in zip(chances, most, strict=True)]
        return self._take(plans, num_tokens, seconds)

    def choose(self, requests: Sequence[Request], drafts: Sequence[Draft], num_tokens: int) -> list[int]:
        """How many tokens of each draft to compute, in a step of `num_tokens` without them."""
        if self._trying:  # `limits` has allowed a trial: it is made
            return [len(draft.token_ids) for draft in drafts]
        plans = []
        for request, draft in zip(requests, drafts, strict=True):
            plan: list[float] = []
            for node, confidence in enumerate(draft.confidences):
                parent = draft.parent(node)
                before = 1.0 if parent < 0 else plan[parent]
                plan.append(before * self.acceptance.chance(request, confidence))
            plans.append(plan)
        return self._take(plans, num_tokens, 0.0)

    def pay(self, requests: Sequence[Request], depth: int, num_tokens: int) -> bool:
        """Whether drafts of `depth` tokens for each request, whole or not at all, are expected to gain time in a step
        of `num_tokens` without them. By acceptance so far alone: the answer must not change with every token."""
        total = num_tokens + depth * len(requests)
        if not requests:
            return False
        if not self.costs.is_settled(total):
            self._pays = True
            return True
        if not self.costs.is_settled(num_tokens):  # a run without drafts, to compare with
            self._pays = False
            return False
        expected = float(num_tokens)
        for request in requests:
            chance = self.acceptance.lasting(request)
            expected += sum(chance ** (place + 1) for place in range(depth))
        gain = expected / num_tokens * self.costs.seconds(num_tokens) / self.costs.seconds(total)
        self._pays = gain > _WORTH
        if self._pays:
            self._gap = _FIRST_GAP
        elif self._may_try():
            # One such step interrupts what was queued ahead, so it is rare from the first time on.
            self._gap = min(2 * self._gap, _LONGEST_GAP)
            self._trying = False
            return True
        return self._pays

    def learn(self, requests: Sequence[Request], drafts: Sequence[Draft], accepted: Sequence[Sequence[int]]) -> None:
        for request, draft, tokens in zip(requests, drafts, accepted, strict=True):
            self.acceptance.record(request, _trials(draft, tokens))
        if self._trying:
            self._gap = _FIRST_GAP if any(accepted) else min(2 * self._gap, _LONGEST_GAP)
            self._trying = False

    def _take(self, plans: list[list[float]], num_tokens: int, draft_seconds: float) -> list[int]:
        """`plans[i][j]`: the chance that token j of draft i and all before it hold. Never rises with j."""
        order = sorted(
            ((chance, -depth, row) for row, plan in enumerate(plans) for depth, chance in enumerate(plan)), reverse=True
        )
        lengths = [0] * len(plans)
        if not order:
            return lengths
        expected = float(num_tokens)
        best, best_count = _WORTH * expected / self.costs.seconds(num_tokens), 0
        rounds = 0
        for count, (chance, depth, _) in enumerate(order, start=1):
            expected += chance
            rounds = max(rounds, 1 - depth)
            rate = expected / (self.costs.seconds(num_tokens + count) + rounds * draft_seconds)
            if rate > best:
                best, best_count = rate, count
        if best_count == 0 and self._may_try():
            best_count = 1
        for _, _, row in order[:best_count]:
            lengths[row] += 1
        return lengths

    def _may_try(self) -> bool:
        self._since_trial += 1
        if self._since_trial < self._gap:
            return False
        self._since_trial = 0
        self._trying = True
        return True


def _trials(draft: Draft, accepted: Sequence[int]) -> list[tuple[float, bool]]:
    """Tested were the tokens that follow an accepted one (or the last known one): after each, one held or none."""
    trials, node = [], -1
    for token_id in (*accepted, None):
        following = None if token_id is None else draft.child(node, token_id)
        for place, confidence in enumerate(draft.confidences):
            if draft.parent(place) == node:
                trials.append((confidence, place == following))
        if following is None:
            break
        node = following
    return trials


def _bucket(confidence: float) -> int:
    return min(_BUCKETS - 1, int(confidence * _BUCKETS))
