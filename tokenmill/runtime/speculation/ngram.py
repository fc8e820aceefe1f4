"""Prompt lookup: the last few tokens appeared before in this very request; what followed them then may follow now.

Owns, for each request, a table from every n-gram to the place after its latest occurrence, extended as tokens come.
Knows nothing of models. Memory: about four table entries per token of a running request.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation.base import Drafter, Target, refuse_argument
from tokenmill.types import Request, ScheduledTokens

_LENGTHS = (5, 4, 3, 2)  # of n-grams, tried from long to short
_DOUBT = 0.7  # each further token that agrees leaves this share of the doubt


def match_confidence(length: int) -> float:
    """How sure a continuation is after a match of so many tokens: rises with the length, whatever the text."""
    return float(1.0 - _DOUBT**length)


def continuation(token_ids: Sequence[int], place: int, limit: int) -> list[int]:
    """`limit` tokens from `place` on. Where the text ends it goes on with itself: a loop is followed round."""
    found = list(token_ids[place : place + limit])
    period = len(token_ids) - place
    while len(found) < limit:
        found.append(found[len(found) - period])
    return found


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
        place, length = table.find(request.token_ids)
        if not length or not limit:
            return Draft()
        confidences = [match_confidence(length + depth) for depth in range(limit)]
        return Draft(continuation(request.token_ids, place, limit), confidences)


class _Table:
    """n-gram -> where its latest occurrence ends, over all but the last token of one request."""

    def __init__(self) -> None:
        self._places: list[dict[tuple[int, ...], int]] = [{} for _ in _LENGTHS]
        self._end = 1  # n-grams that end here or later are not in the tables yet

    def find(self, token_ids: list[int]) -> tuple[int, int]:
        """(the place after the latest earlier occurrence of the longest known ending, its length); length 0: none."""
        total = len(token_ids)
        for end in range(self._end, total):
            for length, places in zip(_LENGTHS, self._places, strict=True):
                if end >= length:
                    places[tuple(token_ids[end - length : end])] = end
        self._end = max(self._end, total)
        for length, places in zip(_LENGTHS, self._places, strict=True):
            place = places.get(tuple(token_ids[total - length :])) if total > length else None
            if place is not None:
                return place, length
        return 0, 0
