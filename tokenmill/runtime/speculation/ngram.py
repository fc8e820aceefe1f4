"""Prompt lookup: where the last few tokens occurred earlier in the request, what followed them then is drafted.

Owns, for each request, a table from every n-gram to the position after its latest occurrence, extended as tokens come.
Knows nothing of models. Memory: about four table entries per token of a running request.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation.base import Drafter, Target, refuse_argument
from tokenmill.types import Request, ScheduledTokens

_LENGTHS = (5, 4, 3, 2)  # of n-grams, tried from long to short
_DOUBT = 0.7  # factor on 1 - confidence for each further matching token


def match_confidence(length: int) -> float:
    """The confidence in what follows a match of `length` tokens."""
    return float(1.0 - _DOUBT**length)


def continuation(token_ids: Sequence[int], start: int, limit: int) -> list[int]:
    """`limit` tokens from `start` on; past the end of the text, the part from `start` on repeats."""
    tokens = list(token_ids[start : start + limit])
    period = len(token_ids) - start
    while len(tokens) < limit:
        tokens.append(tokens[len(tokens) - period])
    return tokens


class NgramDrafter(Drafter):
    name = "ngram"
    ready_made = True

    def __init__(self) -> None:
        self._tables: WeakKeyDictionary[Request, _Table] = WeakKeyDictionary()

    @classmethod
    def build(cls, argument: str, _target: Target) -> NgramDrafter:
        refuse_argument(cls.name, argument)
        return cls()

    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        return [self._draft(row.request, limit) for row, limit in zip(rows, limits, strict=True)]

    def _draft(self, request: Request, limit: int) -> Draft:
        table = self._tables.get(request)
        if table is None:
            table = self._tables[request] = _Table()
        start, length = table.find(request.token_ids)
        if not length or not limit:
            return Draft()
        confidences = [match_confidence(length + depth) for depth in range(limit)]
        return Draft(continuation(request.token_ids, start, limit), confidences)


class _Table:
    """n-gram -> where its latest occurrence ends, over all but the last token of one request."""

    def __init__(self) -> None:
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in _LENGTHS]
        self._indexed = 1  # n-grams that end at this position or later are not in the tables yet

    def find(self, token_ids: list[int]) -> tuple[int, int]:
        """(position after the latest earlier occurrence of the longest known suffix, its length); length 0: none."""
        total = len(token_ids)
        for end in range(self._indexed, total):
            for length, ends in zip(_LENGTHS, self._ends, strict=True):
                if end >= length:
                    ends[tuple(token_ids[end - length : end])] = end
        self._indexed = max(self._indexed, total)
        for length, ends in zip(_LENGTHS, self._ends, strict=True):
            found = ends.get(tuple(token_ids[total - length :])) if total > length else None
            if found is not None:
                return found, length
        return 0, 0
