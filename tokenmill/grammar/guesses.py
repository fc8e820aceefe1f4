"""What probably follows in an output that a grammar guides: one token at a time, with a confidence.

A state of a grammar is known by the tokens that it allows. Several sources each propose a token: what came in that
state before, by grammar and owner and with the last few tokens before it; what came after these tokens in other outputs
of the owner; over all of them the punctuation that is allowed, which learns how a model sets brackets, quotes and
blanks; what followed the same tokens earlier in the request itself, whose prompt often shows the schema (repeats.py);
and where the bytes are certain but not their tokens, the longest one. How often each kind of proposal was right is
measured, and the best one wins. Where only one token is allowed it is certain. Wrong guesses cost time, never
correctness. Bounded memory; knows no requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tokenmill.grammar.repeats import Repeats
from tokenmill.grammar.vocabulary import Bits
from tokenmill.types import CompiledGrammar

HISTORY = 24  # tokens before a state that matter, at most
_LENGTHS = (4, 2, 1, 0)  # how many are part of what is counted for a grammar
_SHARED_LENGTHS = (5, 3)  # the same, for all grammars of an owner
_MAX_CONTEXTS = 1 << 16  # of grammars, and of punctuation; the oldest make room
_MAX_COUNT = 64  # of a context: beyond it all are halved, so that a change of habit shows
_DOUBT = 0.6  # added to the number of trials: what was seen once is not certain
_CONTENT = -1  # instead of a token that is no punctuation
_MAX_SPELLINGS = 16
_BUCKETS = 8  # of the share that a token had in its context
_FORCED_BYTES = 0.7  # before it is measured: confidence in the longest of several tokens that spell the same text
_REPEATS = (0.2, 0.35, 0.5, 0.6)  # before it is measured: by the number of tokens that are repeated
_PRIOR_TRIALS = 6.0  # weight of what is assumed before
_DECAY = 0.995  # of earlier trials with each new one

Kind = tuple[str, int, int]  # source, length, bucket


@dataclass(slots=True)
class State:
    """Where an output is in its grammar."""

    allowed: int  # a hash of the tokens that are allowed, and of whose output it is
    punctuation: int  # of those of punctuation
    tokens: list[int]  # the allowed ones, where they are few; else empty
    mask: Bits | None = None
    owner: int = 0

    def allows(self, token_id: int) -> bool:
        if self.tokens or self.mask is None:
            return token_id in self.tokens
        return token_id < 32 * len(self.mask) and bool(int(self.mask[token_id // 32]) >> token_id % 32 & 1)


@dataclass(frozen=True, slots=True)
class Guess:
    token_id: int
    confidence: float
    proposed: Mapping[Kind, int] = field(default_factory=dict)  # by all sources


def read_state(mask: Bits, grammar: CompiledGrammar, owner: bytes = b"") -> State:
    """`owner`: what others wrote in this state is not guessed, so that its presence cannot be timed."""
    words = np.flatnonzero(mask)
    tokens: list[int] = []
    if len(words) <= _MAX_SPELLINGS:
        found = [32 * int(word) + bit for word in words for bit in range(32) if int(mask[word]) >> bit & 1]
        tokens = found if len(found) <= _MAX_SPELLINGS else []
    known = grammar.punctuation
    punctuation = 0 if known is None else hash((mask & known).tobytes())
    return State(hash((owner, mask.tobytes())), punctuation, tokens, mask, hash(owner))


class Guesses:
    def __init__(self) -> None:
        self._counts = _Counts()
        self._punctuation = _Counts()
        self._rates: dict[Kind, tuple[float, float]] = {}  # (right, tried) of each kind of proposal, decaying

    def guess(
        self, grammar: CompiledGrammar, state: State, before: Sequence[int], repeats: Repeats | None = None
    ) -> Guess | None:
        """What comes after the tokens `before`; None if nothing is known."""
        if len(state.tokens) == 1:
            return Guess(state.tokens[0], 1.0)
        proposed = self._proposals(grammar, state, before, repeats)
        if not proposed:
            return None
        chances = {kind: self._chance(kind, prior) for kind, (_, prior) in proposed.items()}
        best = max(chances, key=chances.__getitem__)
        return Guess(proposed[best][0], chances[best], {kind: token for kind, (token, _) in proposed.items()})

    def learn(
        self,
        grammar: CompiledGrammar,
        state: State,
        before: Sequence[int],
        token_id: int,
        proposed: Mapping[Kind, int] | None = None,
    ) -> None:
        """`token_id` came in this state, where `proposed` was guessed."""
        if len(state.tokens) == 1:
            return
        for kind, proposal in (proposed or {}).items():
            right, tried = self._rates.get(kind, (0.0, 0.0))
            self._rates[kind] = right * _DECAY + (proposal == token_id), tried * _DECAY + 1.0
        for _, context in _contexts(grammar, state, before):
            self._counts.add(context, token_id)
        came = token_id if _is_punctuation(grammar, token_id) else _CONTENT
        for context in _punctuation_contexts(grammar, state, before):
            self._punctuation.add(context, came)

    def _proposals(
        self, grammar: CompiledGrammar, state: State, before: Sequence[int], repeats: Repeats | None
    ) -> dict[Kind, tuple[int, float]]:
        """Kind -> (token, its chance before anything of this kind was measured)."""
        found: dict[Kind, tuple[int, float]] = {}
        for (source, length), context in _contexts(grammar, state, before):
            best = self._counts.best(context)
            if best is not None and state.allows(best[0]):
                found[source, length, _bucket(best[1])] = best
        for number, context in enumerate(_punctuation_contexts(grammar, state, before)):
            best = self._punctuation.best(context)
            if best is not None and best[0] != _CONTENT:
                found["punctuation", number, _bucket(best[1])] = best
        if repeats is not None:
            for length, token_id in repeats.after(before):
                if state.allows(token_id):
                    found["repeat", length, 0] = token_id, _REPEATS[min(length, len(_REPEATS)) - 1]
        longest = _longest_spelling(grammar, state.tokens) if state.tokens else None
        if longest is not None:
            found["forced", 0, 0] = longest, _FORCED_BYTES
        return found

    def _chance(self, kind: Kind, prior: float) -> float:
        right, tried = self._rates.get(kind, (0.0, 0.0))
        return (right + _PRIOR_TRIALS * prior) / (tried + _PRIOR_TRIALS)


def _contexts(grammar: CompiledGrammar, state: State, before: Sequence[int]) -> list[tuple[tuple[str, int], int]]:
    """((source, length), hash) of what is counted for a state."""
    size = len(before)
    own = [(("state", n), hash((grammar.key, state.allowed, *before[size - n :]))) for n in _LENGTHS if n <= size]
    shared = [(("owner", n), hash((state.owner, *before[size - n :]))) for n in _SHARED_LENGTHS if n <= size]
    return own + shared


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


def _longest_spelling(grammar: CompiledGrammar, token_ids: Sequence[int]) -> int | None:
    """The longest token, if the others are beginnings of it: the bytes are forced then, their tokens are not."""
    spelled = {token_id: grammar.token_bytes(token_id) for token_id in token_ids}
    longest = max(token_ids, key=lambda token_id: len(spelled[token_id]))
    return longest if all(spelled[longest].startswith(data) for data in spelled.values()) else None


def _bucket(share: float) -> int:
    return min(_BUCKETS - 1, int(share * _BUCKETS))


class _Counts:
    """How often each token came, by context."""

    def __init__(self) -> None:
        self._contexts: dict[int, dict[int, int]] = {}

    def add(self, context: int, token_id: int) -> None:
        seen = self._contexts.pop(context, None)  # and to the end: what is used stays
        if seen is None:
            if len(self._contexts) >= _MAX_CONTEXTS:
                del self._contexts[next(iter(self._contexts))]
            seen = {}
        self._contexts[context] = seen
        seen[token_id] = seen.get(token_id, 0) + 1
        if seen[token_id] > _MAX_COUNT:
            halved = {each: count // 2 for each, count in seen.items()}
            self._contexts[context] = {each: count for each, count in halved.items() if count}

    def best(self, context: int) -> tuple[int, float] | None:
        """The most frequent token, and its share."""
        seen = self._contexts.get(context)
        if not seen:
            return None
        token_id = max(seen, key=seen.__getitem__)
        return token_id, seen[token_id] / (sum(seen.values()) + _DOUBT)
