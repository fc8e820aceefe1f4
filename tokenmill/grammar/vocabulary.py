"""The tokenizer in the form that the grammar library reads: the bytes of every token, and which tokens are not text.

Built once per model; takes about a second for a large vocabulary. Called by the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenmill.errors import UnavailableError

if TYPE_CHECKING:
    from llguidance import LLTokenizer


_GUARD = "\x02"
_PUNCTUATION = frozenset(b'{}[]":, \t\r\n')
Bits = NDArray[np.int32]  # one bit for each token, the first token lowest


class TokenBytes(Protocol):
    """The part of a tokenizer that is used here."""

    vocab_size: int
    bos_id: int | None
    special_ids: frozenset[int]
    adds_leading_space: bool

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]: ...


class _Tokens:
    """Carries the attributes that the library looks for."""

    def __init__(self, tokenizer: TokenBytes, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted({*tokenizer.special_ids, *eos_ids} & set(range(tokenizer.vocab_size)))
        self._ids: dict[bytes, int] = {}
        for token_id, data in enumerate(self.tokens):
            if data and token_id not in tokenizer.special_ids:
                self._ids.setdefault(data, token_id)
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids whose bytes are exactly those of the text: the library calls this for forced text.

        For a tokenizer that puts a space before a text, a guard character goes first and is removed again.
        """
        data = text.encode() if isinstance(text, str) else text
        guard = _GUARD if self._tokenizer.adds_leading_space else ""
        ids = self._tokenizer.encode(guard + data.decode(), add_special_tokens=False)
        if guard:
            guard_index = next((n for n, token in enumerate(ids) if self.tokens[token] == _GUARD.encode()), len(ids))
            ids = ids[guard_index + 1 :]
        return ids if b"".join(self.tokens[each] for each in ids) == data else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token at each position, as far as the vocabulary reaches."""
        ids, start = [], 0
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[data[start:end]])
            start = end
        return ids


def punctuation_of(tokenizer: TokenBytes) -> Bits:
    """The tokens that are nothing but the punctuation of JSON."""
    flags = np.zeros(-(-tokenizer.vocab_size // 32) * 32, dtype=np.uint8)
    for token_id in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token_id)
        flags[token_id] = bool(data) and token_id not in tokenizer.special_ids and _PUNCTUATION.issuperset(data)
    return np.packbits(flags, bitorder="little").view(np.int32)


def build_vocabulary(tokenizer: TokenBytes, eos_ids: Sequence[int]) -> LLTokenizer:
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError:
        raise UnavailableError("structured output needs the package llguidance", "pip install llguidance") from None
    known = [token_id for token_id in eos_ids if token_id < tokenizer.vocab_size]
    return LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, known)), eos_token=known)
