"""What usually follows in an output that a grammar guides: one token at a time, with a confidence.

A state of a grammar is known by the tokens that it allows. What came in that state is counted: by grammar and owner,
with the last few tokens before it; and over all of them by the punctuation that is allowed, which learns how a model
sets brackets, quotes and blanks. Where only one token is allowed it is certain; where the bytes are certain but not
their tokens, the longest one is guessed. Wrong guesses cost time, never correctness. Bounded memory; knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from tokenmill.grammar.vocabulary import Bits
from tokenmill.types import CompiledGrammar

HISTORY = 24  # tokens before a state that matter, at most
_LENGTHS = (4, 2, 1, 0)  # how many are part of what is counted for a grammar
_MAX_CONTEXTS = 1 << 14  # of one grammar, and of punctuation; the oldest make room
_MAX_COUNT = 64  # of a context: beyond it all are halved, so that a change of habit shows
_DOUBT = 0.6  # added to the number of trials: what was seen once is not certain
_CONTENT = -1  # instead of a token that is no punctuation
_FORCED_BYTES = 0.6  # confidence in the longest of several tokens that spell the same text
_MAX_SPELLINGS = 16


@dataclass(slots=True)
class State:
    """Where an output is in its grammar."""

    allowed: int  # a hash of the tokens that are allowed, and of whose output it is
    punctuation: int  # of those of punctuation
    tokens: list[int]  # the allowed ones, where they are few; else empty


@dataclass(frozen=True, slots=True)
class Guess:
    token_id: int
    confidence: float


def read_state(mask: Bits, grammar: CompiledGrammar, owner: bytes = b"") -> State:
    """`owner`: what others wrote in this state is not guessed, so that its presence cannot be timed."""
    words = np.flatnonzero(mask)
    tokens: list[int] = []
    if len(words) <= _MAX_SPELLINGS:
        found = [32 * int(word) + bit for word in words for bit in range(32) if int(mask[word]) >> bit & 1]
        tokens = found if len(found) <= _MAX_SPELLINGS else []
    known = grammar.punctuation
    return State(hash((owner, mask.tobytes())), 0 if known is None else hash((mask & known).tobytes()), tokens)


class Guesses:
    def __init__(self) -> None:
        self._grammars: WeakKeyDictionary[CompiledGrammar, _Counts] = WeakKeyDictionary()
        self._punctuation = _Counts()

    def guess(self, grammar: CompiledGrammar, state: State, before: Sequence[int]) -> Guess | None:
        """What comes after the tokens `before`; None if nothing is known."""
        if len(state.tokens) == 1:
            return Guess(state.tokens[0], 1.0)
        best: Guess | None = None
        counts = self._grammars.get(grammar)
        found = [] if counts is None else [counts.best(_context(state, before, length)) for length in _LENGTHS]
        found += [self._punctuation.best(context) for context in _punctuation_contexts(grammar, state, before)]
        for each in found:
            if each is not None and each.token_id != _CONTENT and (best is None or each.confidence > best.confidence):
                best = each
        if best is None and state.tokens:
            return _longest_spelling(grammar, state.tokens)
        return best

    def learn(self, grammar: CompiledGrammar, state: State, before: Sequence[int], token_id: int) -> None:
        """`token_id` came in this state."""
        if len(state.tokens) == 1:
            return
        counts = self._grammars.get(grammar)
        if counts is None:
            counts = self._grammars[grammar] = _Counts()
        for length in _LENGTHS:
            counts.add(_context(state, before, length), token_id)
        came = token_id if _is_punctuation(grammar, token_id) else _CONTENT
        for context in _punctuation_contexts(grammar, state, before):
            self._punctuation.add(context, came)


def _context(state: State, before: Sequence[int], length: int) -> int:
    return hash((state.allowed, *before[len(before) - length :])) if length <= len(before) else 0


def _punctuation_contexts(grammar: CompiledGrammar, state: State, before: Sequence[int]) -> tuple[int, ...]:
    """Alone, with the token before if it is punctuation, and with the last two of punctuation, which tell how deep
    a line is indented."""
    if grammar.punctuation is None:
        return ()
    last = [token_id for token_id in before if _is_punctuation(grammar, token_id)][-2:]
    adjacent = before[-1] if last and before[-1] == last[-1] else _CONTENT
    alone = state.punctuation
    return alone, hash((alone, adjacent)), hash((alone, adjacent, *last))


def _is_punctuation(grammar: CompiledGrammar, token_id: int) -> bool:
    known = grammar.punctuation
    return known is not None and token_id < 32 * len(known) and bool(int(known[token_id // 32]) >> token_id % 32 & 1)


def _longest_spelling(grammar: CompiledGrammar, token_ids: Sequence[int]) -> Guess | None:
    """The longest token, if the others are beginnings of it: the bytes are forced then, their tokens are not."""
    spelled = {token_id: grammar.token_bytes(token_id) for token_id in token_ids}
    longest = max(token_ids, key=lambda token_id: len(spelled[token_id]))
    if not all(spelled[longest].startswith(data) for data in spelled.values()):
        return None
    return Guess(longest, _FORCED_BYTES)


class _Counts:
    """How often each token came, by context."""

    def __init__(self) -> None:
        self._contexts: dict[int, dict[int, int]] = {}

    def add(self, context: int, token_id: int) -> None:
        if not context:
            return
        seen = self._contexts.get(context)
        if seen is None:
            if len(self._contexts) >= _MAX_CONTEXTS:
                del self._contexts[next(iter(self._contexts))]
            seen = self._contexts[context] = {}
        seen[token_id] = seen.get(token_id, 0) + 1
        if seen[token_id] > _MAX_COUNT:
            halved = {each: count // 2 for each, count in seen.items()}
            self._contexts[context] = {each: count for each, count in halved.items() if count}

    def best(self, context: int) -> Guess | None:
        seen = self._contexts.get(context)
        if not seen:
            return None
        token_id = max(seen, key=seen.__getitem__)
        return Guess(token_id, seen[token_id] / (sum(seen.values()) + _DOUBT))
