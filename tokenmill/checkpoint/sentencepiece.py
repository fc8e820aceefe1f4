"""SentencePiece BPE without a merge list: joins the neighbours whose union scores best, as the format defines it.

Plain Python on purpose: it needs only a dictionary of the pieces (ready in milliseconds for 262 thousand of them, where
deriving merges takes seconds), and words are remembered. Knows nothing about special tokens. Called by
gguf_tokenizer.py.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from itertools import pairwise

from tokenmill.checkpoint.piece_bytes import SPACE
from tokenmill.errors import CheckpointError

_MAX_REMEMBERED = 65536
_MAX_WORD = 64  # longer words are not worth remembering


class SentencePieceBPE:
    """Text (without special tokens) to ids. Equal scores: the leftmost pair first."""

    def __init__(
        self, pieces: Sequence[str], ids: dict[str, int], scores: Sequence[float], unknown_id: int | None
    ) -> None:
        self._ids = ids
        self._scores = scores
        self._unknown_id = unknown_id
        self._boundary = _word_boundary(pieces)
        self._remembered: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in self._boundary.split(text.replace(" ", SPACE)):
            known = self._remembered.get(word)
            if known is None:
                known = tuple(self._encode_word(word))
                if len(word) <= _MAX_WORD:
                    if len(self._remembered) >= _MAX_REMEMBERED:
                        self._remembered.clear()
                    self._remembered[word] = known
            ids.extend(known)
        return ids

    def _encode_word(self, word: str) -> list[int]:
        ids: list[int] = []
        for symbol in self._merge(word):
            token_id = self._ids.get(symbol)
            if token_id is None:
                ids.extend(self._byte_ids(symbol))
            else:
                ids.append(token_id)
        return ids

    def _merge(self, word: str) -> list[str]:
        """A heap of candidate pairs over a linked list of symbols; a pair that has since changed is passed over."""
        symbols: list[str] = list(word)  # "" once merged into its left neighbour
        before = list(range(-1, len(symbols) - 1))
        after = [*range(1, len(symbols)), -1]
        queue: list[tuple[float, int, int, str]] = []  # (-score, left, right, union)
        ids, scores = self._ids, self._scores

        def offer(left: int, right: int) -> None:
            union = symbols[left] + symbols[right]
            token_id = ids.get(union)
            if token_id is not None:
                heapq.heappush(queue, (-scores[token_id], left, right, union))

        for left in range(len(symbols) - 1):
            offer(left, left + 1)
        while queue:
            _, left, right, union = heapq.heappop(queue)
            if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != len(union):
                continue
            symbols[left], symbols[right] = union, ""
            following = after[right]
            after[left] = following
            if following >= 0:
                before[following] = left
                offer(left, following)
            if before[left] >= 0:
                offer(before[left], left)
        return [symbol for symbol in symbols if symbol]

    def _byte_ids(self, symbol: str) -> list[int]:
        """A character outside the vocabulary: its UTF-8 bytes as byte tokens, or the unknown token."""
        ids = [self._ids.get(f"<0x{byte:02X}>") for byte in symbol.encode()]
        known = [token_id for token_id in ids if token_id is not None]
        if len(known) == len(ids):
            return known
        if self._unknown_id is None:
            raise CheckpointError(
                f"the vocabulary has neither {symbol!r} nor byte tokens nor an unknown token", "convert the model again"
            )
        return [self._unknown_id]


def _word_boundary(pieces: Sequence[str]) -> re.Pattern[str]:
    """Where text may be cut without changing the result: before a space that no piece joins to what precedes it."""
    joined = {SPACE}
    for piece in pieces:
        if SPACE in piece[1:]:
            joined.update(left for left, right in pairwise(piece) if right == SPACE)
    characters = "".join(re.escape(character) for character in sorted(joined))
    return re.compile(f"(?<=[^{characters}])(?={SPACE})")
