"""Masks by the state of a grammar: computed once for all outputs that come there.

Of the grammars that states.py follows. Shared by all requests, lanes and threads; a kept mask cannot be written to. The
ones that were not used for the longest time make room. Made by the compiler, asked by progress.py.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenmill.grammar.states import State, States
from tokenmill.grammar.vocabulary import Bits

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_MAX_BYTES = 64 << 20
_ENTRY_BYTES = 400  # of a mask, beside its bits
_MAX_PLACES = 4096  # of a grammar, that are remembered: long lists of choices have more

_Key = tuple[Any, ...]


class KeptMasks:
    """Of all grammars of a compiler, over its vocabulary."""

    def __init__(self, vocabulary: LLTokenizer, max_bytes: int = _MAX_BYTES) -> None:
        self._vocabulary = vocabulary
        self._texts: list[bytes | None] = [None] * vocabulary.vocab_size  # of the tokens that came so far
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._masks: OrderedDict[_Key, Bits] = OrderedDict()
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def next_number(self) -> int:
        """Of a grammar. Its masks may outlive it, what follows its states may not."""
        return next(self._numbers)

    def text(self, token_id: int) -> bytes:
        """Of a token; empty for one that ends the output or is no text."""
        try:
            known = self._texts[token_id]
        except IndexError:
            return b""
        if known is None:
            known = self._texts[token_id] = self._read_text(token_id)
        return known

    def _read_text(self, token_id: int) -> bytes:
        vocabulary = self._vocabulary
        if token_id in vocabulary.eos_tokens or vocabulary.is_special_token(token_id):
            return b""
        data: bytes = vocabulary.decode_bytes([token_id])
        return b"" if data == b"<[%d]>" % token_id else data  # so the library shows a token without bytes

    def find(self, key: _Key) -> Bits | None:
        with self._lock:
            bits = self._masks.get(key)
            if bits is not None:
                self._masks.move_to_end(key)
            return bits

    def keep(self, key: _Key, bits: Bits) -> Bits:
        """The mask of the key from now on: another one if another thread was faster."""
        bits.flags.writeable = False
        with self._lock:
            before = self._masks.get(key)
            if before is not None:
                return before
            self._masks[key] = bits
            self._num_bytes += bits.nbytes + _ENTRY_BYTES
            while self._num_bytes > self._max_bytes:
                _, oldest = self._masks.popitem(last=False)
                self._num_bytes -= oldest.nbytes + _ENTRY_BYTES
        return bits


class Place(NamedTuple):
    """Where an output is."""

    state: State
    key: _Key


class GrammarMasks:
    """Of one grammar."""

    def __init__(self, states: States, kept: KeptMasks) -> None:
        self._states, self._kept = states, kept
        self._number = kept.next_number()
        self._places: dict[State, Place] = {}  # where the state alone decides
        self.start = self._place(states.start, None)

    def after(self, place: Place, token_id: int) -> Place | None:
        text = self._kept.text(token_id)
        state = self._states.after(place.state, text) if text else None
        if state is None:
            return None
        return self._places.get(state) or self._place(state, token_id)

    def find(self, place: Place) -> Bits | None:
        return self._kept.find(place.key)

    def keep(self, place: Place, bits: Bits) -> Bits:
        return self._kept.keep(place.key, bits)

    def _place(self, state: State, token_id: int | None) -> Place:
        if self._states.may_be_forced(state):
            # Forced text is split into tokens together with the token before it: several bytes may be split otherwise.
            return Place(state, (self._number, state, token_id))
        place = Place(state, (self._number, state))
        if len(self._places) < _MAX_PLACES:
            self._places[state] = place
        return place
