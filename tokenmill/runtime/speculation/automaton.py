"""A suffix automaton over tokens, extended one token at a time: every substring of a text in linear memory.

Finds in constant amortized time the longest suffix of a stream of tokens that occurs in the text, and where. Used by
the suffix drafter for a request's own text and for the texts of earlier requests; knows nothing of either.
"""

from __future__ import annotations

from collections.abc import Iterable

_ROOT = 0


class SuffixAutomaton:
    """State s stands for a set of substrings with the same occurrences; the longest has `_length[s]` tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._edges: list[dict[int, int]] = [{}]
        self._link = [-1]  # the state of the longest suffix that also occurs elsewhere
        self._length = [0]
        self._end = [0]  # where the latest occurrence ends, as far as it was updated
        self._last = _ROOT

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._append(token)

    def repeated(self) -> tuple[int, int]:
        """(end of the earlier occurrence, length) of the longest suffix of the text that occurs in it earlier."""
        state = self._link[self._last]
        return (self._end[state], self._length[state]) if state > _ROOT else (0, 0)

    def step(self, match: Match, token: int) -> Match:
        """Follow a stream of tokens: the longest match after `token`, from the longest match before it."""
        state, length = match.state, match.length
        while state != _ROOT and token not in self._edges[state]:
            state = self._link[state]
            length = self._length[state]
        following = self._edges[state].get(token)
        return Match() if following is None else Match(following, length + 1, self._end[following])

    def _append(self, token: int) -> None:
        seen = self._link[self._last]
        if seen > _ROOT:  # this suffix ends here too: drafts follow the latest occurrence
            self._end[seen] = len(self.tokens)
        self.tokens.append(token)
        new = self._make({}, self._length[self._last] + 1, len(self.tokens))
        state = self._last
        while state != -1 and token not in self._edges[state]:
            self._edges[state][token] = new
            state = self._link[state]
        if state == -1:
            self._link[new] = _ROOT
        else:
            self._link[new] = self._split(state, token)
        self._last = new

    def _split(self, state: int, token: int) -> int:
        """The state for exactly `state` followed by `token`; a state that also stands for longer strings is split."""
        following = self._edges[state][token]
        if self._length[following] == self._length[state] + 1:
            return following
        copy = self._make(dict(self._edges[following]), self._length[state] + 1, self._end[following])
        self._link[copy] = self._link[following]
        self._link[following] = copy
        while state != -1 and self._edges[state].get(token) == following:
            self._edges[state][token] = copy
            state = self._link[state]
        return copy

    def _make(self, edges: dict[int, int], length: int, end: int) -> int:
        self._edges.append(edges)
        self._link.append(-1)
        self._length.append(length)
        self._end.append(end)
        return len(self._edges) - 1


class Match:
    """The longest suffix of a stream that occurs in the text: state, length in tokens, end in the text."""

    __slots__ = ("end", "length", "state")

    def __init__(self, state: int = _ROOT, length: int = 0, end: int = 0) -> None:
        self.state = state
        self.length = length
        self.end = end
