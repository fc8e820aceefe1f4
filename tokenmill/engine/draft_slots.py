"""Slots beyond the scheduled tokens of a step: for guesses of a drafter, or for a run of tokens that the runner
computes alone. They come out of the budget and the pages that nobody else needs. Where nothing but grammars is drafted
from, sequences without one have no slots for guesses. The scheduler calls this last in each step.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.engine.kv.manager import KVManager
from tokenmill.types import Request, ScheduledTokens

Rows = dict[Request, ScheduledTokens]


@dataclass(frozen=True, slots=True)
class DraftSlots:
    """`max_drafts`: tokens that the runner may guess for any sequence; `grammar_drafts`: for one that a grammar
    guides."""

    max_drafts: int
    grammar_drafts: int
    context_length: int

    def hold(self, kv: KVManager, rows: Rows, budget: int, run: int) -> None:
        """Slots after the tokens of a step, from `budget` tokens that are left of it."""
        if self.max_drafts or (self.grammar_drafts and any(map(_is_guided, rows))):
            self._hold_drafts(kv, rows, budget)
        elif run > 1:
            hold_run(kv, rows, budget, run - 1, self.context_length)

    def _hold_drafts(self, kv: KVManager, rows: Rows, budget: int) -> None:
        for request, row in rows.items():
            most = max(self.max_drafts, self.grammar_drafts if _is_guided(request) else 0)
            wanted = min(budget, _max_slots(request, row, most, self.context_length))
            row.num_draft_slots = _reserve_after(kv, request, row, wanted)
            budget -= row.num_draft_slots


def _is_guided(request: Request) -> bool:
    return request.params.structured is not None


def hold_run(kv: KVManager, rows: Rows, budget: int, wanted: int, context_length: int) -> None:
    """Equally many slots after every token, where all rows are decodes: else the runner could not go on alone."""
    most = [_max_slots(request, row, wanted, context_length) for request, row in rows.items()]
    slots = min([*most, budget // max(1, len(most))])
    for request, row in rows.items():
        slots = _reserve_after(kv, request, row, slots)
    for row in rows.values():
        row.num_draft_slots = slots


def _max_slots(request: Request, row: ScheduledTokens, wanted: int, context_length: int) -> int:
    """How many slots a row may hold beyond its token. No more than the request can still take, so that all accepted
    ones and one token more are its own."""
    if row.count > 1 or not row.samples or row.start < len(request.prompt_ids):
        return 0
    left = min(request.params.max_tokens - request.num_output_tokens, context_length - request.num_tokens)
    return max(0, min(wanted, left - 1))


def _reserve_after(kv: KVManager, request: Request, row: ScheduledTokens, slots: int) -> int:
    """Up to `slots` slots after those of a row; how many there are."""
    if slots <= 0:
        return 0
    return max(0, kv.reserve(request, row.count + slots, only_spare=True).num_tokens - row.count)
