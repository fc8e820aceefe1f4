"""Jump-forward: drafts for outputs that a grammar guides, from the grammar itself and from what followed in it before.

Walks the grammar from where an output is: a token that alone is allowed is certain, others are guessed from earlier
outputs (grammar/guesses.py), until a guess is too unsure. Verification samples at each position as without drafts, so
that seeds, log-probabilities, stops and the output stay what they are. Learns from what came instead. Called by the
speculator beside its drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from tokenmill.grammar.guesses import HISTORY, Guess, Guesses, State, read_state
from tokenmill.grammar.repeats import Repeats
from tokenmill.runtime.executors.base import Draft, TokenSampler
from tokenmill.types import Request

_LEAST_CHANCE = 0.25  # that all tokens of a draft hold: a longer one is not drafted


@dataclass(slots=True)
class _Walk:
    """The draft of a request in this step: the states that it went through with what was guessed there, its tokens."""

    states: list[tuple[State, Guess | None]]
    token_ids: list[int]


class GrammarDrafter:
    def __init__(self, sampler: TokenSampler[Any]) -> None:
        self._sampler = sampler
        self._guesses = Guesses()
        self._walks: WeakKeyDictionary[Request, _Walk] = WeakKeyDictionary()
        self._repeats: WeakKeyDictionary[Request, Repeats] = WeakKeyDictionary()

    def draft(self, request: Request, limit: int) -> Draft:
        grammar = request.grammar
        draft = Draft()
        progress = self._sampler.grammar_progress(request)
        if grammar is None or progress is None or not progress.is_cheap:
            return draft
        walk = self._walks[request] = _Walk([], [])
        repeats = self._repeats.setdefault(request, Repeats())
        repeats.extend(request.token_ids)
        before, chance = request.token_ids[-HISTORY:], 1.0
        while len(draft.token_ids) < limit:
            mask = progress.mask()
            if mask is None:
                break
            state = read_state(mask, grammar, request.cache_salt)
            guess = self._guesses.guess(grammar, state, before, repeats)
            walk.states.append((state, guess))
            if guess is None or guess.token_id in request.stop_ids or chance * guess.confidence < _LEAST_CHANCE:
                break
            chance *= guess.confidence
            draft.token_ids.append(guess.token_id)
            walk.token_ids.append(guess.token_id)  # the draft itself may be cut
            draft.confidences.append(guess.confidence)
            before = [*before, guess.token_id]
            if not progress.advance(guess.token_id) or not progress.is_cheap:
                break
        return draft

    def observe(self, request: Request, token_ids: Sequence[int]) -> None:
        """What came after the tokens of the request. Learned from, as far as the draft went the same way."""
        walk = self._walks.pop(request, None)
        if walk is None or request.grammar is None:
            return
        before = request.token_ids[-HISTORY:]
        for number, ((state, guess), token_id) in enumerate(zip(walk.states, token_ids, strict=False)):
            self._guesses.learn(request.grammar, state, before, token_id, guess.proposed if guess is not None else {})
            if number >= len(walk.token_ids) or walk.token_ids[number] != token_id:
                break
            before = [*before, token_id]
