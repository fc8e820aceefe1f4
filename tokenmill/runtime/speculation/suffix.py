"""Suffix matching: drafts what followed the longest suffix of the sequence that occurs earlier in it or in recent
requests.

Unlike n-grams a match has any length, so that a long one can be told from a coincidence, and texts of finished requests
serve later ones (agents and templates repeat themselves). Owns one automaton per running request over its last tokens
and two generations of one over finished requests; both bounded. Knows nothing of models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from weakref import WeakKeyDictionary, finalize

from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation.automaton import Match, SuffixAutomaton
from tokenmill.runtime.speculation.base import Drafter, Target, refuse_argument
from tokenmill.runtime.speculation.ngram import continuation, match_confidence
from tokenmill.types import Request, ScheduledTokens

_MIN_MATCH = 2  # tokens
_OWN_TOKENS = 8192  # last tokens of a prompt that are indexed
_RECENT_TOKENS = 16384  # in a generation of finished requests; two are kept
_CATCH_UP = 64  # last tokens of a request that are matched when it first meets a generation; bounds the match
_SEPARATOR = -1  # between two texts: not a token id, so that nothing matches across
_BYTES_PER_TOKEN = 900  # measured: two states, their edges and numbers


class SuffixDrafter(Drafter):
    name = "suffix"
    ready_made = True

    def __init__(self, concurrency: int = 1) -> None:
        self._concurrency = concurrency
        self._texts: WeakKeyDictionary[Request, _Text] = WeakKeyDictionary()
        self._finished: deque[list[int]] = deque()  # texts of finished requests, not yet in a generation
        self._generations = [SuffixAutomaton()]

    @classmethod
    def build(cls, argument: str, target: Target) -> SuffixDrafter:
        refuse_argument(cls.name, argument)
        return cls(target.config.concurrency)

    @property
    def nbytes(self) -> int:
        return (self._concurrency * _OWN_TOKENS + 2 * _RECENT_TOKENS) * _BYTES_PER_TOKEN

    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        while self._finished:
            self._remember(self._finished.popleft())
        return [self._draft(row.request, limit) for row, limit in zip(rows, limits, strict=True)]

    def _draft(self, request: Request, limit: int) -> Draft:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _Text(request.token_ids)
            # When the request has finished and is collected, its text becomes available to later requests.
            finalize(request, self._finished.append, text.own.tokens)
        source, start, length = text.find(request.token_ids, self._generations)
        if length < _MIN_MATCH or not limit:
            return Draft()
        tokens = continuation(source, start, limit)
        if _SEPARATOR in tokens:
            del tokens[tokens.index(_SEPARATOR) :]
        return Draft(tokens, [match_confidence(length + depth) for depth in range(len(tokens))])

    def _remember(self, tokens: list[int]) -> None:
        if len(self._generations[-1]) + len(tokens) + 1 > _RECENT_TOKENS and len(self._generations[-1]):
            self._generations = [self._generations[-1], SuffixAutomaton()]
        self._generations[-1].extend(tokens[-_RECENT_TOKENS:])
        self._generations[-1].extend([_SEPARATOR])


class _Text:
    """One request: the automaton of its own tokens, and its current match in each generation of finished requests."""

    def __init__(self, token_ids: list[int]) -> None:
        self.own = SuffixAutomaton()
        self._num_indexed = max(0, len(token_ids) - _OWN_TOKENS)
        self._matches: WeakKeyDictionary[SuffixAutomaton, Match] = WeakKeyDictionary()

    def find(self, token_ids: list[int], generations: list[SuffixAutomaton]) -> tuple[list[int], int, int]:
        """(text, position after the match, length of the match) of the longest match; the request's own text wins
        ties."""
        new = token_ids[self._num_indexed :]
        self._num_indexed = len(token_ids)
        self.own.extend(new)
        best: tuple[list[int], int, int] = (self.own.tokens, *self.own.repeated())
        for automaton in reversed(generations):
            match = self._matches.get(automaton)
            stream = new
            if match is None:
                match, stream = Match(), token_ids[-_CATCH_UP:]
            for token in stream:
                match = automaton.step(match, token)
            self._matches[automaton] = match
            if match.length > best[2]:
                best = (automaton.tokens, match.end, match.length)
        return best
