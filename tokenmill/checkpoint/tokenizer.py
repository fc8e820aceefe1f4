"""Text to token ids and back, whatever file the vocabulary came from.

Owns the one `Tokenizer` class; gguf_tokenizer.py and hf_tokenizer.py build it, tokenizer_files.py finds files. Plain
text never turns into control tokens unless the caller asks with `parse_special`. Knows nothing about models, templates
or files; imports no torch. Called by the engine, the server and the evaluators.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Protocol, runtime_checkable

from tokenmill.errors import UserError


class TextEncoder(Protocol):
    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Ids of the text alone, without the tokens that start or end a sequence."""
        ...


@runtime_checkable
class BatchEncoder(Protocol):
    """An encoder that is faster with many texts at once."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode` of each, without control tokens."""
        ...


class Vocabulary(Protocol):
    size: int

    def piece(self, token_id: int) -> str:
        """The token as the vocabulary writes it; "" for an id it does not have."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text; b"" for an id without text."""
        ...


class Tokenizer:
    """One vocabulary with its rules. Safe to share between threads."""

    def __init__(
        self,
        encoder: TextEncoder,
        vocabulary: Vocabulary,
        *,
        bos_id: int | None,
        eos_ids: Iterable[int],
        special_ids: Iterable[int],
        prefix_ids: tuple[int, ...] = (),
        suffix_ids: tuple[int, ...] = (),
        pair_middle: tuple[int, ...] | None = None,
        adds_leading_space: bool = False,
        dropped_bytes: bytes | None = None,
        reads_text: bool = True,
    ) -> None:
        """`dropped_bytes`: those of a text that become no token; None if it cannot be told, because the encoding
        normalizes text, strips blanks or the like. `pair_middle`: what stands between the two texts of a pair; None if
        the tokenizer knows no pairs. `reads_text`: False for a model whose tokenizer is missing."""
        self._encoder = encoder
        self._vocabulary = vocabulary
        self._prefix_ids = prefix_ids
        self._suffix_ids = suffix_ids
        self._pair_middle = pair_middle
        self.bos_id = bos_id
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.special_ids = frozenset(special_ids)  # hidden by skip_special_tokens
        self.adds_leading_space = adds_leading_space  # encoding puts a space before the text, decoding takes it away
        self.vocab_size = vocabulary.size
        self._dropped_bytes = dropped_bytes
        self.reads_text = reads_text

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`.

        `add_special_tokens`: with the tokens that start (and end) a sequence of this model. `parse_special`: control
        tokens written out in the text become those tokens; only for text from a chat template, never for a user's.
        """
        _check_unicode(text)
        ids = self._encoder.encode(text, parse_special)
        return [*self._prefix_ids, *ids, *self._suffix_ids] if add_special_tokens else ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """As `encode` of each text."""
        for text in texts:
            _check_unicode(text)
        if isinstance(self._encoder, BatchEncoder):
            encoded = self._encoder.encode_batch(texts)
        else:
            encoded = [self._encoder.encode(text, False) for text in texts]
        if not add_special_tokens or not (self._prefix_ids or self._suffix_ids):
            return encoded
        return [[*self._prefix_ids, *ids, *self._suffix_ids] for ids in encoded]

    def cut(self, ids: list[int], max_tokens: int) -> list[int]:
        """The beginning of a text that was encoded with its special tokens, which stay."""
        if len(ids) <= max_tokens:
            return ids
        end = len(self._suffix_ids)
        return [*ids[: max_tokens - end], *self._suffix_ids] if max_tokens > end else ids[:max_tokens]

    def pair(self, first: Sequence[int], second: Sequence[int], max_tokens: int | None = None) -> tuple[list[int], int]:
        """Two texts, encoded without special tokens, as one sequence; and where the second begins. Beyond
        `max_tokens` the longer one is cut first."""
        if self._pair_middle is None:
            raise UserError("the tokenizer of this model knows no pairs of texts", "use a cross-encoder")
        if max_tokens is not None:
            room = max_tokens - len(self._prefix_ids) - len(self._pair_middle) - len(self._suffix_ids)
            if room < 2:
                raise UserError(f"{max_tokens} tokens are too few for a pair of texts", "give more")
            first, second = _cut_longest(first, second, room)
        head = [*self._prefix_ids, *first, *self._pair_middle]
        return [*head, *second, *self._suffix_ids], len(head)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence. Bytes that are not UTF-8 become U+FFFD."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(token_id) for token_id in ids if token_id not in hidden)
        if self.adds_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")

    def min_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, found without encoding it; 0 if none is known."""
        if self._dropped_bytes is None:
            return 0
        num_bytes = len(text.encode("utf-8", "replace").translate(None, self._dropped_bytes))
        return -(-num_bytes // self._max_token_bytes)

    @cached_property
    def _max_token_bytes(self) -> int:
        # A piece, as the vocabulary writes it, is no shorter than its text; an unknown character has up to 4 bytes.
        return max(4, *(len(self.id_to_piece(token_id).encode()) for token_id in range(self.vocab_size)))

    def id_to_piece(self, token_id: int) -> str:
        return self._vocabulary.piece(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes this token adds to the text (of a control token: its name)."""
        return self._vocabulary.token_bytes(token_id)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text has half a surrogate pair at character {error.start}", "send valid Unicode text"
        ) from None


def _cut_longest(first: Sequence[int], second: Sequence[int], room: int) -> tuple[Sequence[int], Sequence[int]]:
    """As if tokens were taken one by one from the end of whichever is longer."""
    if len(first) + len(second) <= room:
        return first, second
    short = min(len(first), len(second), room // 2)
    if len(first) <= len(second):
        return first[:short], second[: room - short]
    return first[: room - short], second[:short]
