"""Drafts that a step makes for the next one: used where they win against plain steps that are queued ahead."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation.base import Drafter, Target
from tokenmill.runtime.speculation.speculator import Speculator
from tokenmill.types import Request, SamplingParams, ScheduledTokens, StepResult

DEPTH = 4


class _Guesser(Drafter):
    name = "guesser"
    computes = True
    needs_hidden = True
    guessed_depth = DEPTH

    def __init__(self) -> None:
        self.seen: tuple[Request | None, int] = (None, 0)

    @classmethod
    def build(cls, argument: str, target: Target) -> _Guesser:
        raise NotImplementedError(argument, target)

    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        ready = self.seen == (rows[0].request, rows[0].request.num_tokens)
        return [Draft([7] * min(DEPTH, limits[0]), [0.5] * min(DEPTH, limits[0])) if ready else Draft()]


class _World:
    """A sequence after the other. The first step after a change between drafts and none finds nothing queued."""

    def __init__(self, chance: float, with_drafts: float, without: float, late: float) -> None:
        self.now, self.tokens, self.drafted, self.asked = 0.0, 0, 0, 0
        self._chance, self._seconds, self._late = chance, {True: with_drafts, False: without}, late
        self._before, self._draw, self._guesser = False, random.Random(2), _Guesser()
        sampler: Any = None
        self._speculator = Speculator(self._guesser, sampler, lambda: self.now)

    def run(self, sequences: int, length: int) -> float:
        """Seconds for each token."""
        for number in range(sequences):
            request = Request(str(number), [1, 2], SamplingParams(max_tokens=length))
            while request.num_output_tokens < length:
                self._step(request)
        return self.now / self.tokens

    def _step(self, request: Request) -> None:
        row = ScheduledTokens(request, request.num_tokens - 1, 1, ([],), True, num_draft_slots=7)
        drafts = self._speculator.propose([row])
        held = 0
        while drafts and held < DEPTH and self._draw.random() < self._chance:
            held += 1
        self.now += self._seconds[bool(drafts)] + (self._late if bool(drafts) != self._before else 0.0)
        self._before = bool(drafts)
        result = StepResult([5], [None], [None])
        if held:
            result.accepted = {0: [7] * held}
        self._speculator.learn([row], drafts, result)
        request.token_ids += [7] * held + [5]
        if drafts or self._speculator.wants_hidden:
            self._guesser.seen = (request, request.num_tokens)
            self.asked += not drafts
        self.tokens += held + 1
        self.drafted += bool(drafts)


def test_drafts_that_lose_against_queued_steps_are_left_alone() -> None:
    world = _World(chance=0.5, with_drafts=1.4e-3, without=0.57e-3, late=0.6e-3)
    seconds = world.run(40, 128)
    assert 0.57e-3 / seconds > 0.97
    assert world.asked < world.tokens / 20  # hidden states are hardly ever copied


@pytest.mark.parametrize("late", [0.0, 0.6e-3])
def test_drafts_that_win_are_used(late: float) -> None:
    world = _World(chance=0.5, with_drafts=0.7e-3, without=0.57e-3, late=late)
    seconds = world.run(40, 128)
    assert 0.57e-3 / seconds > 1.45
    assert world.drafted > 0.9 * world.tokens / 2


def test_a_text_that_becomes_easy_is_noticed() -> None:
    world = _World(chance=0.1, with_drafts=0.7e-3, without=0.57e-3, late=0.6e-3)
    world.run(40, 128)
    before = world.drafted
    world._chance = 0.9
    world.run(100, 128)
    assert world.drafted - before > 1000
