"""How many drafted tokens a step verifies: those that are expected to save time, possibly none.

Measures how often drafts of a given confidence are accepted, per request and overall (Acceptance), and what steps cost
(costs.py). Drafted tokens of all rows are then added in the order of their probability of acceptance, as long as tokens
per second rise. While drafts do not pay, a single token is tried at increasing intervals, so that a change of text or
load is noticed at a cost of well under one percent. Imports no torch. Called by the speculator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation.costs import CAPTURED_SLOPE, DEFAULT_SLOPE, StepCosts
from tokenmill.types import Request

_BUCKETS = 16  # of confidence
# Decay of earlier trials with each new one: of all requests, of one request, and of the long-term rates of both.
_GLOBAL_DECAY = 0.98
_REQUEST_DECAY = 0.9
_LONG_TERM_DECAY = 0.97
_PRIOR_TRIALS = 4.0  # weight, in trials, of the next more general estimate
_LONG_TERM_PRIOR_TRIALS = 16.0
_MIN_GAIN = 1.02  # expected speedup from which drafts are used: less is noise
_MIN_GAP, _MAX_GAP = 64, 1024  # steps between two trials while drafts do not pay


@dataclass(slots=True)
class _Rate:
    """Exponentially decaying counts of trials and accepted tokens."""

    held: float = 0.0
    tried: float = 0.0

    def record(self, held: bool, decay: float) -> None:
        self.held = self.held * decay + held
        self.tried = self.tried * decay + 1.0

    def estimate(self, prior: float, weight: float = _PRIOR_TRIALS) -> float:
        return (self.held + weight * prior) / (self.tried + weight)


@dataclass(slots=True)
class _RequestRates:
    by_confidence: list[_Rate] = field(default_factory=lambda: [_Rate() for _ in range(_BUCKETS)])
    overall: _Rate = field(default_factory=_Rate)
    long_term: _Rate = field(default_factory=_Rate)  # as overall, with slower decay


class Acceptance:
    """The probability that a drafted token is accepted, given that those before it were."""

    def __init__(self) -> None:
        self._all_requests = _RequestRates()
        self._requests: WeakKeyDictionary[Request, _RequestRates] = WeakKeyDictionary()

    def record(self, request: Request, trials: Sequence[tuple[float, bool]]) -> None:
        """`trials`: the confidence of each token that was verified, and whether it was accepted."""
        own = self._requests.setdefault(request, _RequestRates())
        for confidence, held in trials:
            bucket = _bucket(confidence)
            for rates, decay in ((self._all_requests, _GLOBAL_DECAY), (own, _REQUEST_DECAY)):
                rates.by_confidence[bucket].record(held, decay)
                rates.overall.record(held, decay)
                rates.long_term.record(held, _LONG_TERM_DECAY)

    def chance(self, request: Request, confidence: float) -> float:
        bucket = _bucket(confidence)
        general = self._all_requests.by_confidence[bucket].estimate(confidence)
        own = self._requests.get(request)
        return general if own is None else own.by_confidence[bucket].estimate(general)

    def overall(self, request: Request) -> float:
        """Whatever the confidence: for decisions before anything is drafted."""
        general = self._all_requests.overall.estimate(0.6)
        own = self._requests.get(request)
        return general if own is None else own.overall.estimate(general)

    def long_term(self, request: Request) -> float:
        """As `overall`, but slower to change: after a decision against drafts the next trial is far away, so a few
        rejections in a row must not decide."""
        general = self._all_requests.long_term.estimate(0.6)
        own = self._requests.get(request)
        return general if own is None else own.long_term.estimate(general, _LONG_TERM_PRIOR_TRIALS)


class DraftLengths:
    def __init__(self, padded: Callable[[int], int] | None = None) -> None:
        """`padded`: what a step with drafts, of so many tokens in all, is padded to, and therefore costs."""
        self.costs = StepCosts(DEFAULT_SLOPE if padded is None else CAPTURED_SLOPE)
        self.padded = padded or (lambda num_tokens: num_tokens)
        self.acceptance = Acceptance()
        self._gap = _MIN_GAP
        self._since_trial = 0
        self._trying = False
        self._paid = True

    @property
    def is_paused(self) -> bool:
        """Whether `pays` was false and will probably be false for the next step too. If it is true after all, that step
        still has no drafts, because the drafter has not seen the hidden states of the step before."""
        return not self._paid and self._since_trial + 1 < self._gap

    def limits(
        self, requests: Sequence[Request], max_lengths: Sequence[int], num_tokens: int, seconds: float
    ) -> list[int]:
        """How many tokens to draft for each request, where drafting itself takes time. `seconds`: to draft one token of
        every request. `num_tokens`: of the step without drafts."""
        chances = [self.acceptance.overall(request) for request in requests]
        pairs = zip(chances, max_lengths, strict=True)
        plans = [[chance ** (depth + 1) for depth in range(length)] for chance, length in pairs]
        return self._best_lengths(plans, num_tokens, seconds)

    def choose(self, requests: Sequence[Request], drafts: Sequence[Draft], num_tokens: int) -> list[int]:
        """How many tokens of each draft to verify, in a step of `num_tokens` without them."""
        if self._trying:  # `limits` decided on a trial
            return [len(draft.token_ids) for draft in drafts]
        plans = []
        for request, draft in zip(requests, drafts, strict=True):
            plan: list[float] = []
            for node, confidence in enumerate(draft.confidences):
                parent = draft.parent(node)
                before = 1.0 if parent < 0 else plan[parent]
                plan.append(before * self.acceptance.chance(request, confidence))
            plans.append(plan)
        return self._best_lengths(plans, num_tokens, 0.0)

    def pays(self, requests: Sequence[Request], depth: int, num_tokens: int) -> bool:
        """Whether drafts of exactly `depth` tokens for each request are expected to save time in a step of `num_tokens`
        without them. Decided by past acceptance alone: the answer must not change with every token."""
        total = self.padded(num_tokens + depth * len(requests))
        if not requests:
            return False
        if not self.costs.is_settled(total):
            self._paid = True
            return True
        if not self.costs.is_settled(num_tokens):  # measure steps without drafts, for comparison
            self._paid = False
            return False
        expected = float(num_tokens)
        for request in requests:
            chance = self.acceptance.long_term(request)
            expected += sum(chance ** (position + 1) for position in range(depth))
        gain = expected / num_tokens * self.costs.seconds(num_tokens) / self.costs.seconds(total)
        self._paid = gain > _MIN_GAIN
        if self._paid:
            self._gap = _MIN_GAP
        elif self._trial_is_due():
            # Such a step interrupts the steps queued ahead, so the gap grows from the first trial on.
            self._gap = min(2 * self._gap, _MAX_GAP)
            self._trying = False
            return True
        return self._paid

    def learn(self, requests: Sequence[Request], drafts: Sequence[Draft], accepted: Sequence[Sequence[int]]) -> None:
        for request, draft, tokens in zip(requests, drafts, accepted, strict=True):
            self.acceptance.record(request, _trials(draft, tokens))
        if self._trying:
            self._gap = _MIN_GAP if any(accepted) else min(2 * self._gap, _MAX_GAP)
            self._trying = False

    def _best_lengths(self, plans: list[list[float]], num_tokens: int, draft_seconds: float) -> list[int]:
        """How many tokens of each draft to use. `plans[i][j]`: the probability that token j of draft i and all before
        it are accepted; never rises with j."""
        order = sorted(
            ((chance, -depth, row) for row, plan in enumerate(plans) for depth, chance in enumerate(plan)), reverse=True
        )
        lengths = [0] * len(plans)
        if not order:
            return lengths
        expected = float(num_tokens)
        best, best_count = _MIN_GAIN * expected / self.costs.seconds(num_tokens), 0
        rounds = 0
        for count, (chance, depth, _) in enumerate(order, start=1):
            expected += chance
            rounds = max(rounds, 1 - depth)
            rate = expected / (self.costs.seconds(self.padded(num_tokens + count)) + rounds * draft_seconds)
            if rate > best:
                best, best_count = rate, count
        if best_count == 0 and self._trial_is_due():
            best_count = 1
        for _, _, row in order[:best_count]:
            lengths[row] += 1
        return lengths

    def _trial_is_due(self) -> bool:
        self._since_trial += 1
        if self._since_trial < self._gap:
            return False
        self._since_trial = 0
        self._trying = True
        return True


def _trials(draft: Draft, accepted: Sequence[int]) -> list[tuple[float, bool]]:
    """Confidence and acceptance of the tokens that were verified: those whose parent is accepted or the last known
    token."""
    trials, node = [], -1
    for token_id in (*accepted, None):
        following = None if token_id is None else draft.child(node, token_id)
        for child, confidence in enumerate(draft.confidences):
            if draft.parent(child) == node:
                trials.append((confidence, child == following))
        if following is None:
            break
        node = following
    return trials


def _bucket(confidence: float) -> int:
    return min(_BUCKETS - 1, int(confidence * _BUCKETS))
