"""Steps that check drafts, one after the other on the device: when the next can be queued unseen, and what it then was.

A queued check was worked out on the device from the step before (step/accepted_drafts.py); the host, once it has
seen that step, repeats the reasoning and takes the queued step only if it is the one it would ask for. No tensors here.
Used by the graph executor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from tokenmill.types import Batch, Request, ScheduledTokens

Expected = list[tuple[Request, int, int]]  # per row: request, position, token id


class StepHead(Protocol):
    """Guesses inside a captured step."""

    depth: int

    def note(self, batch: Batch) -> None:
        """Told of every step before it is computed: the tokens that it reads. Safe to capture."""
        ...

    def guess(self, hidden: Tensor, last: Tensor, batch: Batch) -> Tensor:
        """hidden [R, hidden] and the token drawn at each row -> int64 [R, depth]: what may follow. The batch's keys and
        values are stored."""
        ...


class Checks:
    def __init__(self, depth: int, page_size: int, context: int) -> None:
        """`depth`: drafts of a sequence."""
        self._depth, self._page_size, self._context = depth, page_size, context

    def owners(self, rows: Sequence[ScheduledTokens]) -> list[int]:
        """By row: the first row of its sequence; -1 where the sequence has fewer drafts than it could."""
        owners = []
        for first, past in _sequences(rows):
            owners += [first if past - first == self._depth + 1 else -1] * (past - first)
        return owners

    def can_follow(self, rows: Sequence[ScheduledTokens]) -> bool:
        """Whether the step after this one, of the same sequences, can be launched unseen, whatever holds."""
        for first, past in _sequences(rows):
            row = rows[first]
            request, last = row.request, row.start + 2 * self._depth + 1
            if past - first != self._depth + 1 or last >= self._context:
                return False
            if any(last // self._page_size >= len(table) for table in row.block_tables):
                return False
            # The drafts are lent to the request while they are checked.
            if request.num_output_tokens + 1 >= request.params.max_tokens:
                return False
            if request.params.n > 1 and not request.forked:
                return False  # its siblings join in the next step
        return True

    def expect(self, rows: Sequence[ScheduledTokens], drawn: list[int], guessed: list[list[int]]) -> Expected:
        """The rows of the step after this one, as the device has worked them out."""
        expected: Expected = []
        for first, past in _sequences(rows):
            drafts = [rows[place].request.token_ids[rows[place].start] for place in range(first + 1, past)]
            held = 0
            while held < len(drafts) and drafts[held] == drawn[first + held]:
                held += 1
            tokens = [drawn[first + held], *guessed[first + held]]
            position = rows[first].start + held + 1
            expected += [(rows[first].request, position + place, token) for place, token in enumerate(tokens)]
        return expected

    def are_expected(self, rows: Sequence[ScheduledTokens], expected: Expected, tables: list[list[list[int]]]) -> bool:
        """`tables`: by group and row, what the device wrote and read by."""
        size = self._page_size
        asked = [(row.request, row.start, row.request.token_ids[row.start]) for row in rows]
        return asked == expected and all(
            table[row.start // size] == known[place][row.start // size]
            for place, row in enumerate(rows)
            for known, table in zip(tables, row.block_tables, strict=True)
        )


def _sequences(rows: Sequence[ScheduledTokens]) -> Iterator[tuple[int, int]]:
    """[first, past) of the rows of each sequence: they lie together."""
    first = 0
    for place in range(1, len(rows) + 1):
        if place == len(rows) or rows[place].request is not rows[first].request:
            yield first, place
            first = place
