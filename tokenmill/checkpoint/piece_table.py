"""The pieces of a GGUF vocabulary by id and by text: in C++ where the kernels are built, in Python lists elsewhere.

Where a piece occurs twice the lower id wins; an empty piece is called after its id. Decoded one by one when asked for:
a process that answers one prompt needs few of them. Knows nothing of what pieces mean; used by gguf_tokenizer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from tokenmill.checkpoint.gguf_metadata import StringArray
from tokenmill.kernels import native


class PieceTable(Protocol):
    size: int

    def piece(self, token_id: int) -> str:
        """ "" for an id that it does not have."""
        ...

    def find(self, piece: str) -> int | None: ...

    @property
    def pieces(self) -> list[str]: ...

    @property
    def ids(self) -> dict[str, int]: ...


def _name_of(piece: str, token_id: int) -> str:
    return piece or f"[EMPTY_{token_id}]"


class ListedPieces:
    def __init__(self, pieces: Sequence[str]) -> None:
        self.size = len(pieces)
        self.pieces = [_name_of(piece, token_id) for token_id, piece in enumerate(pieces)]

    @cached_property
    def ids(self) -> dict[str, int]:
        return dict(zip(reversed(self.pieces), range(self.size - 1, -1, -1), strict=True))

    def piece(self, token_id: int) -> str:
        return self.pieces[token_id] if 0 <= token_id < self.size else ""

    def find(self, piece: str) -> int | None:
        return self.ids.get(piece)


class StoredPieces:
    """With the merges of byte-level BPE: `encode` gives the tokens of words."""

    def __init__(self, pieces: StringArray, merges: StringArray, whole_words: bool) -> None:
        """Raises ValueError if a merge names a piece that there is not. `whole_words`: one that is a piece is that
        token, whatever the merges say."""
        self.size = len(pieces.starts)
        arrays = (pieces.buffer, pieces.starts, merges.buffer, merges.starts)
        self._stored: Any = native.module().BytePairs(*arrays, whole_words)

    def piece(self, token_id: int) -> str:
        if not 0 <= token_id < self.size:
            return ""
        return _name_of(self._stored.piece(token_id).decode(errors="replace"), token_id)

    def find(self, piece: str) -> int | None:
        token_id: int = self._stored.find(piece)
        return token_id if token_id >= 0 else None

    def encode(self, words: list[str]) -> list[int]:
        """A byte that is no token becomes `size`."""
        ids: list[int] = self._stored.encode(words)
        return ids

    @property
    def pieces(self) -> list[str]:
        return [self.piece(token_id) for token_id in range(self.size)]

    @property
    def ids(self) -> dict[str, int]:
        return ListedPieces(self.pieces).ids


def stored_strings(strings: Sequence[str]) -> StringArray:
    """As they would stand in a file."""
    encoded = [each.encode() for each in strings]
    sizes = np.array([len(each) for each in encoded], dtype=np.uint64)
    data = b"".join(len(each).to_bytes(8, "little") + each for each in encoded)
    starts = np.concatenate([np.zeros(1, np.uint64), np.cumsum(sizes + np.uint64(8))[:-1]]) if encoded else sizes
    return StringArray(np.frombuffer(data, np.uint8), starts.astype(np.uint64))
