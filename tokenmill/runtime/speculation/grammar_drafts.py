"""Jump-forward: drafts for outputs that a grammar guides, from the grammar itself and from what followed in it before.

Walks the grammar from where an output is: a token that alone is allowed is certain, others are guessed from earlier
outputs (grammar/guesses.py), until a guess is too unsure. Verification samples at each position as without drafts, so
that seeds, log-probabilities, stops and the output stay what they are. Learns from what came instead. Called by the
speculator beside its drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from tokenmill.grammar.guesses import Guesses, State, read_state
from tokenmill.runtime.executors.base import Draft, TokenSampler
from tokenmill.types import Request

_LEAST_CHANCE = 0.25  # that all tokens of a draft hold: a longer one is not drafted


@dataclass(slots=True)
class _Walk:
    """The last draft of a request: where it began, and the states that it went through."""

    start: int
    states: list[State]
    token_ids: list[int]


class GrammarDrafter:
    def __init__(self, sampler: TokenSampler[Any]) -> None:
        self._sampler = sampler
        self._guesses = Guesses()
        self._walks: WeakKeyDictionary[Request, _Walk] = WeakKeyDictionary()

    def draft(self, request: Request, limit: int) -> Draft:
        grammar = request.grammar
        self._learn(request)
        draft = Draft()
        progress = self._sampler.grammar_progress(request)
        if grammar is None or progress is None or not progress.is_cheap:
            return draft
        walk = self._walks[request] = _Walk(request.num_tokens, [], draft.token_ids)
        before, chance = request.token_ids[-8:], 1.0
        while len(draft.token_ids) < limit:
            mask = progress.mask()
            if mask is None:
                break
            state = read_state(mask, grammar, request.cache_salt)
            walk.states.append(state)
            guess = self._guesses.guess(grammar, state, before)
            if guess is None or guess.token_id in request.stop_ids or chance * guess.confidence < _LEAST_CHANCE:
                break
            chance *= guess.confidence
            draft.token_ids.append(guess.token_id)
            draft.confidences.append(guess.confidence)
            before = [*before, guess.token_id]
            if not progress.advance(guess.token_id) or not progress.is_cheap:
                break
        walk.token_ids = list(draft.token_ids)  # the draft itself may be cut
        return draft

    def _learn(self, request: Request) -> None:
        """What came in the states of the last walk, as far as the output went the same way."""
        walk = self._walks.pop(request, None)
        if walk is None or request.grammar is None:
            return
        came = request.token_ids[walk.start :]
        before = request.token_ids[max(0, walk.start - 8) : walk.start]
        for number, (state, token_id) in enumerate(zip(walk.states, came, strict=False)):
            self._guesses.learn(request.grammar, state, before, token_id)
            if number >= len(walk.token_ids) or walk.token_ids[number] != token_id:
                break
            before = [*before, token_id]
