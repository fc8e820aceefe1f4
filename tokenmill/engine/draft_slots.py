"""Slots beyond the scheduled tokens of a step: for guesses of a drafter, or for a run of tokens that the runner
computes alone. They come out of the budget and the pages that nobody else needs. The scheduler calls this last in each
step.
"""

from __future__ import annotations

from tokenmill.engine.kv.manager import KVManager
from tokenmill.types import Request, ScheduledTokens

Rows = dict[Request, ScheduledTokens]


def hold_draft_slots(kv: KVManager, rows: Rows, budget: int, max_drafts: int, context_length: int) -> int:
    """Slots for guesses after the token of each decode; returns the tokens that are left of the budget."""
    for request, row in rows.items():
        wanted = min(budget, _max_slots(request, row, max_drafts, context_length))
        row.num_draft_slots = _reserve_after(kv, request, row, wanted)
        budget -= row.num_draft_slots
    return budget


def hold_run(kv: KVManager, rows: Rows, budget: int, wanted: int, context_length: int) -> int:
    """Equally many slots after every token, where all rows are decodes: else the runner could not go on alone."""
    most = [_max_slots(request, row, wanted, context_length) for request, row in rows.items()]
    slots = min([*most, budget // max(1, len(most))])
    for request, row in rows.items():
        slots = _reserve_after(kv, request, row, slots)
    for row in rows.values():
        row.num_draft_slots = slots
        budget -= slots
    return budget


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
