"""Steps that verify drafts back to back: when the next can be queued before the results of this one are known.

The device computes the inputs of a queued verification from the step before (step/accepted_drafts.py). Once the host
has that step's results it derives the same inputs, and uses the queued step only if these are the ones it would launch.
No tensors here. Used by the graph executor.
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
    """One token to compute, as a row of a captured step: drafts are verified like a batch of decodes."""

    request: Request
    position: int
    token_id: int
    tables: Tables
    adapter_slot: int = 0


def spread(work: StepInput) -> list[Position]:
    """Every token of a step as a position of its own; those of a sequence are adjacent."""
    return [
        Position(row.request, row.start + offset, token_id, row.block_tables, row.adapter_slot)
        for number, row in enumerate(work.rows)
        for offset, token_id in enumerate(work.token_ids(number))
    ]


class Checks:
    def __init__(self, depth: int, page_size: int, context: int) -> None:
        """`depth`: drafted tokens of a sequence."""
        self._depth, self._page_size, self._context = depth, page_size, context

    def owners(self, positions: Sequence[Position]) -> list[int]:
        """By position: the index of the first of its sequence; -1 if the sequence has fewer than `depth` drafts."""
        owners = []
        for first, end in _sequences(positions):
            owners += [first if end - first == self._depth + 1 else -1] * (end - first)
        return owners

    def can_follow(self, positions: Sequence[Position]) -> bool:
        """Whether the next step of the same sequences can be launched however many drafts of this one are accepted."""
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

    def expect(self, positions: Sequence[Position], sampled: list[int], drafts: list[list[int]]) -> Expected:
        """The positions of the next step, as the device computes them. `sampled`, `drafts` [depth]: by position."""
        expected: Expected = []
        for first, end in _sequences(positions):
            verified = [position.token_id for position in positions[first + 1 : end]]
            held = num_held(verified, sampled[first:end])
            tokens = [sampled[first + held], *drafts[first + held]]
            start = positions[first].position + held + 1
            expected += [(positions[first].request, start + offset, token) for offset, token in enumerate(tokens)]
        return expected

    def are_expected(self, positions: Sequence[Position], expected: Expected, tables: list[list[list[int]]]) -> bool:
        """`tables`: by KV group and row, the page tables that the device used."""
        size = self._page_size
        planned = [(position.request, position.position, position.token_id) for position in positions]
        return planned == expected and all(
            table[position.position // size] == used[row][position.position // size]
            for row, position in enumerate(positions)
            for used, table in zip(tables, position.tables, strict=True)
        )


def _sequences(positions: Sequence[Position]) -> Iterator[tuple[int, int]]:
    """[first, end) of the positions of each sequence, which are adjacent."""
    first = 0
    for end in range(1, len(positions) + 1):
        if end == len(positions) or positions[end].request is not positions[first].request:
            yield first, end
            first = end
