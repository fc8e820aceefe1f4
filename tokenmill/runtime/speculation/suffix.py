"""Suffix matching: the longest ending of a sequence that occurs earlier in it, or in recent requests, is followed.

Unlike n-grams the match has any length, so that a long one can be told from a chance one, and the texts of requests
that have ended serve those that come (agents and templates repeat themselves). Owns one automaton per running request
over its last tokens and two generations of one over ended requests; both bounded. Knows nothing of models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from weakref import WeakKeyDictionary, finalize

from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation.automaton import Place, SuffixAutomaton
from tokenmill.runtime.speculation.base import Drafter, Target, refuse_argument
from tokenmill.runtime.speculation.ngram import continuation, match_confidence
from tokenmill.types import Request, ScheduledTokens

_SHORTEST = 2  # tokens that must agree
_OWN_TOKENS = 8192  # of a prompt that are looked at: its last
_RECENT_TOKENS = 16384  # in a generation of ended requests; two are kept
_WALK = 64  # tokens of a stream that are looked up when it meets a generation: none matches longer than that by then
_BORDER = -1  # between two texts: no token, so that nothing matches across
_BYTES_PER_TOKEN = 900  # measured: two states, their edges and numbers


class SuffixDrafter(Drafter):
    name = "suffix"
    ready_made = True

    def __init__(self, concurrency: int = 1) -> None:
        self._concurrency = concurrency
        self._texts: WeakKeyDictionary[Request, _Text] = WeakKeyDictionary()
        self._ended: deque[list[int]] = deque()  # texts of requests that are gone, not yet in a generation
        self._generations = [SuffixAutomaton()]

    @classmethod
    def build(cls, argument: str, target: Target) -> SuffixDrafter:
        refuse_argument(cls.name, argument)
        return cls(target.config.concurrency)

    @property
    def nbytes(self) -> int:
        return (self._concurrency * _OWN_TOKENS + 2 * _RECENT_TOKENS) * _BYTES_PER_TOKEN

    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        while self._ended:
            self._remember(self._ended.popleft())
        return [self._draft(row.request, limit) for row, limit in zip(rows, limits, strict=True)]

    def _draft(self, request: Request, limit: int) -> Draft:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _Text(request.token_ids)
            # The request is dropped by everyone when it ends; its text then joins those that later ones may follow.
            finalize(request, self._ended.append, text.own.tokens)
        source, place, length = text.find(request.token_ids, self._generations)
        if length < _SHORTEST or not limit:
            return Draft()
        found = continuation(source, place, limit)
        if _BORDER in found:
            del found[found.index(_BORDER) :]
        return Draft(found, [match_confidence(length + depth) for depth in range(len(found))])

    def _remember(self, tokens: list[int]) -> None:
        if len(self._generations[-1]) + len(tokens) + 1 > _RECENT_TOKENS and len(self._generations[-1]):
            self._generations = [self._generations[-1], SuffixAutomaton()]
        self._generations[-1].extend(tokens[-_RECENT_TOKENS:])
        self._generations[-1].extend([_BORDER])


class _Text:
    """One request: the automaton of its own tokens, and where it stands in the generations of others'."""

    def __init__(self, token_ids: list[int]) -> None:
        self.own = SuffixAutomaton()
        self._begin = max(0, len(token_ids) - _OWN_TOKENS)
        self._taken = self._begin
        self._places: WeakKeyDictionary[SuffixAutomaton, Place] = WeakKeyDictionary()

    def find(self, token_ids: list[int], generations: list[SuffixAutomaton]) -> tuple[list[int], int, int]:
        """(text, place in it, length of the match): the longest; of equally long ones the request's own."""
        new = token_ids[self._taken :]
        self._taken = len(token_ids)
        self.own.extend(new)
        best: tuple[list[int], int, int] = (self.own.tokens, *self.own.repeated())
        for automaton in reversed(generations):
            place = self._places.get(automaton)
            stream = new
            if place is None:
                place, stream = Place(), token_ids[-_WALK:]
            for token in stream:
                place = automaton.step(place, token)
            self._places[automaton] = place
            if place.length > best[2]:
                best = (automaton.tokens, place.end, place.length)
        return best
