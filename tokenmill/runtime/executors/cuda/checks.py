"""Steps that check drafts, one after the other on the device: when the next can be queued unseen, and what it then was.

A queued check was worked out on the device from the step before (step/accepted_drafts.py); the host, once it has
seen that step, repeats the reasoning and takes the queued step only if it is the one it would ask for. No tensors here.
Used by the graph executor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenmill.runtime.executors.base import StepInput
from tokenmill.runtime.verify import num_held
from tokenmill.types import Request

Expected = list[tuple[Request, int, int]]  # per position: request, position, token id
Tables = tuple[list[int], ...]  # per KV group: page id by page index


@dataclass(slots=True, eq=False)
class Position:
    """One token to compute, as a row of a captured step: drafts are checked like a batch of decodes."""

    request: Request
    position: int
    token_id: int
    tables: Tables


def spread(work: StepInput) -> list[Position]:
    """Every token of a step as a position of its own; those of a sequence lie together."""
    return [
        Position(row.request, row.start + place, token_id, row.block_tables)
        for number, row in enumerate(work.rows)
        for place, token_id in enumerate(work.token_ids(number))
    ]


class Checks:
    def __init__(self, depth: int, page_size: int, context: int) -> None:
        """`depth`: drafts of a sequence."""
        self._depth, self._page_size, self._context = depth, page_size, context

    def owners(self, positions: Sequence[Position]) -> list[int]:
        """By position: the first of its sequence; -1 where the sequence has fewer drafts than it could."""
        owners = []
        for first, end in _sequences(positions):
            owners += [first if end - first == self._depth + 1 else -1] * (end - first)
        return owners

    def can_follow(self, positions: Sequence[Position]) -> bool:
        """Whether the step after this one, of the same sequences, can be launched unseen, whatever holds."""
        for first, end in _sequences(positions):
            request, tables = positions[first].request, positions[first].tables
            last = positions[first].position + 2 * self._depth + 1
            if end - first != self._depth + 1 or last >= self._context:
                return False
            if any(last // self._page_size >= len(table) for table in tables):
                return False
            if request.num_output_tokens + self._depth + 1 >= request.params.max_tokens:
                return False
            if request.params.n > 1 and not request.forked:
                return False  # its siblings join in the next step
        return True

    def expect(self, positions: Sequence[Position], chosen: list[int], guessed: list[list[int]]) -> Expected:
        """The positions of the step after this one, as the device has worked them out."""
        expected: Expected = []
        for first, end in _sequences(positions):
            drafts = [each.token_id for each in positions[first + 1 : end]]
            held = num_held(drafts, chosen[first:end])
            tokens = [chosen[first + held], *guessed[first + held]]
            start = positions[first].position + held + 1
            expected += [(positions[first].request, start + place, token) for place, token in enumerate(tokens)]
        return expected

    def are_expected(self, positions: Sequence[Position], expected: Expected, tables: list[list[list[int]]]) -> bool:
        """`tables`: by group and position, what the device wrote and read by."""
        size = self._page_size
        asked = [(each.request, each.position, each.token_id) for each in positions]
        return asked == expected and all(
            table[each.position // size] == known[place][each.position // size]
            for place, each in enumerate(positions)
            for known, table in zip(tables, each.tables, strict=True)
        )


def _sequences(positions: Sequence[Position]) -> Iterator[tuple[int, int]]:
    """[first, end) of the positions of each sequence: they lie together."""
    first = 0
    for place in range(1, len(positions) + 1):
        if place == len(positions) or positions[place].request is not positions[first].request:
            yield first, place
            first = place
