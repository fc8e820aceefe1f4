"""Drafts for a step, and what is learned from its outcome. Joins a drafter with the choice of lengths and the clock.

Proposes drafts for the rows that may have some, after cutting what cannot be accepted (past a stop token, against a
grammar) and what is not worth its time; rows and requests are only read. Knows neither logits nor pages. Called by the
runner before and after a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tokenmill.errors import UserError, unknown_name
from tokenmill.runtime.executors.base import Draft, TokenSampler
from tokenmill.runtime.speculation import DRAFTERS
from tokenmill.runtime.speculation.base import Drafter, Target
from tokenmill.runtime.speculation.length import DraftLengths
from tokenmill.types import Request, ScheduledTokens, StepResult

if TYPE_CHECKING:
    from torch import Tensor

_SHORT_PAUSE = 0.002  # seconds between two steps that still belong to the second: nobody waited for work
_MEMORY = 0.9  # of the moving average of what a drafted token costs
_FRUITLESS_TOKENS = 16  # decoded since a draft last held, after which
_UNDRAFTED_RUN = 4  # tokens are decoded before the next draft is looked for
_MAX_DRAFT_TOKENS = 64
_UNSETTLED_STEPS = 2  # after a change between drafts and none: their times say little, nothing was queued ahead of them


def build_speculator(target: Target) -> Speculator | None:
    """What `--speculate NAME[:ARGUMENT]` asks for."""
    name, _, argument = target.config.speculate.partition(":")
    if name in ("off", ""):
        return None
    if name not in DRAFTERS:
        raise unknown_name("drafter", name, ["off", *DRAFTERS])
    if target.config.draft_tokens > _MAX_DRAFT_TOKENS:
        raise UserError(f"draft_tokens is {target.config.draft_tokens}", f"give 1 to {_MAX_DRAFT_TOKENS}")
    drafter: Drafter = DRAFTERS.get(name).build(argument, target)
    guesser = drafter.step_guesser(target)
    if target.executor.attach_drafter(drafter.needs_hidden, guesser) and guesser is not None:
        drafter.guessed_depth = guesser.depth
    return Speculator(drafter, target.executor.sampler)


class Speculator:
    def __init__(
        self, drafter: Drafter, sampler: TokenSampler[Any], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.drafter = drafter
        self.lengths = DraftLengths()
        self._sampler = sampler
        self._clock = clock
        self._ended = 0.0  # when the last step did
        self._began = 0.0  # when this step did, drafting excluded
        self._drafting = 0.0  # seconds that this step's drafts took
        self._round_seconds = 0.0  # of a drafted token of all rows, where drafting computes
        self._fruitless = 0  # tokens of a sequence since a draft held
        self._alike = 0  # steps in a row with drafts, or without
        self._drafted = False  # the last step

    def propose(self, rows: Sequence[ScheduledTokens]) -> dict[int, Draft]:
        """Drafts by row of the plan; rows without one are left out."""
        started = self._clock()
        open_rows = [number for number, row in enumerate(rows) if row.num_draft_slots and not _is_watched(row)]
        drafts = self._draft(rows, open_rows) if open_rows else {}
        self._began = self._clock()
        self._drafting = self._began - started
        if started - self._ended < _SHORT_PAUSE:
            self._began -= max(0.0, started - self._ended)
        return drafts

    @property
    def undrafted(self) -> int:
        """Tokens of a sequence that may be decoded in one call, in a step without drafts: where none held for long,
        the time that a run of steps saves is worth more than the drafts that it misses."""
        return _UNDRAFTED_RUN if self._fruitless >= _FRUITLESS_TOKENS else 1

    @property
    def wants_hidden(self) -> bool:
        """Whether hidden states of a step without drafts are needed: not where none will be made of them."""
        return self.drafter.needs_hidden and not (self.drafter.guessed_depth and self.lengths.rests)

    def observe(self, rows: Sequence[ScheduledTokens], result: StepResult, hidden: Tensor) -> None:
        """`hidden` [rows, hidden]: after the token whose logits chose each row's last one. For who wants it."""
        for number, row in enumerate(rows):
            if row.samples:
                self.drafter.observe(row, len(result.accepted.get(number, ())), hidden[number])

    def take(self, rows: Sequence[ScheduledTokens], result: StepResult, guesses: list[list[int]]) -> None:
        """What the step itself has guessed to follow each row."""
        for number, row in enumerate(rows):
            self.drafter.take(row, len(result.accepted.get(number, ())), guesses[number])

    def learn(self, rows: Sequence[ScheduledTokens], drafts: dict[int, Draft], result: StepResult) -> None:
        """Take in how the drafts did and what the step cost. Enters what was won into `result`."""
        self._ended = self._clock()
        steps = 1 if drafts else 1 + max(map(len, result.accepted.values()), default=0)  # a run of decodes
        seconds = (self._ended - self._began) / steps
        self._fruitless = 0 if drafts and result.accepted else self._fruitless + steps
        decodes = all(row.count == 1 for row in rows)
        self._alike = (self._alike + 1 if bool(drafts) == self._drafted else 0) if decodes else -1
        self._drafted = bool(drafts)
        if decodes:
            num_tokens = len(rows) + sum(len(draft.token_ids) for draft in drafts.values())
            if drafts and self.lengths.costs.is_known(len(rows)):
                num_accepted = sum(map(len, result.accepted.values()))
                plain = self.lengths.costs.seconds(len(rows)) * (len(rows) + num_accepted) / len(rows)
                result.saved_seconds = plain - seconds - self._drafting
            else:
                result.saved_seconds = -self._drafting
            if not self.drafter.guessed_depth or self._alike >= _UNSETTLED_STEPS:
                self.lengths.costs.record(num_tokens, seconds)
        accepted = [result.accepted.get(number, []) for number in drafts]
        self.lengths.learn([rows[number].request for number in drafts], list(drafts.values()), accepted)

    def _draft(self, rows: Sequence[ScheduledTokens], numbers: list[int]) -> dict[int, Draft]:
        asked = [rows[number] for number in numbers]
        requests = [row.request for row in asked]
        num_tokens = sum(row.count for row in rows)
        limits = [row.num_draft_slots for row in asked]
        if self.drafter.guessed_depth:
            return self._draft_to_guessed_depth(rows, numbers)
        if self.drafter.computes:
            limits = self.lengths.limits(requests, limits, num_tokens, self._round_seconds)
            if not any(limits):
                return {}
            started = self._clock()
            drafts = self.drafter.draft(asked, limits)
            self._time_rounds(self._clock() - started, drafts)
        else:
            drafts = self.drafter.draft(asked, limits)
        for row, draft in zip(asked, drafts, strict=True):
            if row.request.params.structured is not None or not all(map(_decodes, rows)):
                draft.straighten()
            draft.cut(self._possible(row.request, draft))
        lengths = self.lengths.choose(requests, drafts, num_tokens)
        found = {}
        for number, draft, length in zip(numbers, drafts, lengths, strict=True):
            if length:
                draft.cut(length)
                found[number] = draft
        return found

    def _draft_to_guessed_depth(self, rows: Sequence[ScheduledTokens], numbers: list[int]) -> dict[int, Draft]:
        """Where a step of drafts makes the next ones and is queued ahead of them: all or none, for cutting them short
        saves nothing and throws the queued step away. Steps with prompts are not queued, and have none."""
        depth = self.drafter.guessed_depth
        if any(row.count > 1 for row in rows):
            return {}
        numbers = [number for number in numbers if rows[number].num_draft_slots >= depth]
        asked = [rows[number] for number in numbers]
        if not self.lengths.pay([row.request for row in asked], depth, sum(row.count for row in rows)):
            return {}
        drafts = self.drafter.draft(asked, [depth] * len(asked))
        for row, draft in zip(asked, drafts, strict=True):
            if row.request.params.structured is not None:
                draft.cut(self._possible(row.request, draft))
        return {number: draft for number, draft in zip(numbers, drafts, strict=True) if draft.token_ids}

    def _possible(self, request: Request, draft: Draft) -> int:
        """How much of a draft could be accepted at all."""
        ids = draft.token_ids
        if draft.parents is not None:
            return len(ids)
        for depth, token_id in enumerate(ids):
            if token_id in request.stop_ids:
                ids = ids[: depth + 1]
                break
        return self._sampler.allowed(request, ids) if ids and request.params.structured is not None else len(ids)

    def _time_rounds(self, seconds: float, drafts: Sequence[Draft]) -> None:
        rounds = max((len(draft.token_ids) for draft in drafts), default=0)
        if rounds:
            each = seconds / rounds
            known = self._round_seconds
            self._round_seconds = each if not known else _MEMORY * known + (1.0 - _MEMORY) * each


def _is_watched(row: ScheduledTokens) -> bool:
    """Whether the attention of the row's tokens is summed up: refused drafts must not count."""
    cache = row.request.params.cache
    return cache is not None and cache.needs_attention


def _decodes(row: ScheduledTokens) -> bool:
    """Whether nothing is asked of the row but the token after its one known token."""
    request = row.request
    if _is_watched(row):
        return False
    return row.count == 1 and row.samples and row.start >= len(request.prompt_ids) - 1 and not request.embeds
