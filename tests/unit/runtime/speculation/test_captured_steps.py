"""Drafts where steps are captured: the first steps of each size say nothing about those that follow."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation.base import Drafter, Target
from tokenmill.runtime.speculation.speculator import Speculator
from tokenmill.types import Request, SamplingParams, ScheduledTokens, StepResult


class _Lookup(Drafter):
    name = "lookup"

    def __init__(self, chance: float) -> None:
        self._chance = chance

    @classmethod
    def build(cls, argument: str, target: Target) -> _Lookup:
        raise NotImplementedError(argument, target)

    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        return [Draft([7] * limit, [self._chance] * limit) for _, limit in zip(rows, limits, strict=True)]


def _padded(num_tokens: int) -> int:
    return 1 << (num_tokens - 1).bit_length()


class _Device:
    """A step is padded to a power of two and takes 4 ms and 0.1 for each token; the first of a size compiles for 5 s,
    the second captures for 60 ms. One with drafts takes `late` more: nothing is queued behind the step before."""

    def __init__(self, chance: float = 0.7, late: float = 0.0) -> None:
        self._chance, self._late = chance, late
        self.now, self.tokens, self._seen, self._draw = 0.0, 0, Counter[int](), random.Random(2)
        sampler: Any = None
        self._speculator = Speculator(_Lookup(chance), sampler, lambda: self.now, padded=_padded)

    def run(self, rows: int, length: int) -> float:
        """Seconds of the last half of the tokens of each sequence."""
        requests = [Request(str(row), [1, 2], SamplingParams(max_tokens=length)) for row in range(rows)]
        began = (self.now, self.tokens)
        while min(request.num_output_tokens for request in requests) < length:
            if self.tokens < rows * length // 2:
                began = (self.now, self.tokens)
            self._step(requests)
        return (self.now - began[0]) / (self.tokens - began[1])

    def _step(self, requests: list[Request]) -> None:
        rows = [ScheduledTokens(each, each.num_tokens - 1, 1, ([],), True, num_draft_slots=7) for each in requests]
        drafts = self._speculator.propose(rows)
        size = _padded(len(rows) + sum(len(draft.token_ids) for draft in drafts.values()))
        self._seen[size] += 1
        self.now += {1: 5.0, 2: 0.06}.get(self._seen[size], 4e-3 + 1e-4 * size) + (self._late if drafts else 0.0)
        result = StepResult([5] * len(rows), [None] * len(rows), [None] * len(rows))
        for row, draft in drafts.items():
            held = 0
            while held < len(draft.token_ids) and self._draw.random() < self._chance:
                held += 1
            if held:
                result.accepted[row] = [7] * held
        self._speculator.learn(rows, drafts, result)
        for row, request in enumerate(requests):
            request.token_ids += [*result.accepted.get(row, []), 5]
            self.tokens += len(result.accepted.get(row, [])) + 1


@pytest.mark.parametrize(("rows", "gain"), [(1, 2.5), (4, 1.8), (16, 1.25)])
def test_slow_first_steps_do_not_end_drafting(rows: int, gain: float) -> None:
    """Nor does a step that is padded to twice the size: drafts fill the size before it."""
    plain = (4e-3 + 1e-4 * rows) / rows
    assert plain / _Device().run(rows, 400) > gain


def test_drafts_of_low_acceptance_are_tried_too() -> None:
    """What more tokens cost is not known before: they are taken for cheap."""
    assert 4.1e-3 / _Device(chance=0.5).run(1, 128) > 1.2


def test_padding_that_drafts_fill_is_not_free() -> None:
    """Five rows are padded to eight with drafts and without, but only without are they queued."""
    plain = (4e-3 + 1e-4 * 8) / 5
    assert plain / _Device(chance=0.1, late=2e-3).run(5, 2000) > 0.97
