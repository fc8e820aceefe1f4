"""Our tokenizer in the form the grammar library wants: the bytes of every token, and which tokens are not text.

Built once per model; takes about a second for a large vocabulary. Called by the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tokenmill.errors import UnavailableError

if TYPE_CHECKING:
    from llguidance import LLTokenizer


_GUARD = "\x02"


class TokenBytes(Protocol):
    """What is needed of a tokenizer here."""

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
        """Ids whose bytes are exactly those of the text: the library asks how forced text is best written.

        A tokenizer that puts a space before a text is asked behind a character that keeps the space away.
        """
        data = text.encode() if isinstance(text, str) else text
        guard = _GUARD if self._tokenizer.adds_leading_space else ""
        ids = self._tokenizer.encode(guard + data.decode(), add_special_tokens=False)
        if guard:
            place = next((place for place, each in enumerate(ids) if self.tokens[each] == _GUARD.encode()), len(ids))
            ids = ids[place + 1 :]
        return ids if b"".join(self.tokens[each] for each in ids) == data else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token at each place, as far as the vocabulary reaches."""
        ids, place = [], 0
        while place < len(data):
            ends = range(min(len(data), place + self._longest), place, -1)
            end = next((end for end in ends if data[place:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[data[place:end]])
            place = end
        return ids


def build_vocabulary(tokenizer: TokenBytes, eos_ids: Sequence[int]) -> LLTokenizer:
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError:
        raise UnavailableError("structured output needs the package llguidance", "pip install llguidance") from None
    known = [token_id for token_id in eos_ids if token_id < tokenizer.vocab_size]
    return LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, known)), eos_token=known)
