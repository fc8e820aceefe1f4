"""What followed the same few tokens earlier in one text: a table that grows with it.

Documents that a grammar guides repeat themselves and their prompts, which often show the schema or an example: keys,
names, the shape of a list's elements. Bounded memory; knows tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

LENGTHS = (4, 3, 2, 1)  # tokens that must be the same
_MAX_INDEXED = 4096  # tokens before the first look


class Repeats:
    def __init__(self) -> None:
        self._following: dict[tuple[int, ...], int] = {}  # the latest
        self._indexed: int | None = None  # tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        """The text has become this long."""
        first = max(0, len(token_ids) - _MAX_INDEXED) if self._indexed is None else self._indexed
        for end in range(first, len(token_ids)):
            for length in LENGTHS:
                if end - length >= 0:
                    self._following[tuple(token_ids[end - length : end])] = token_ids[end]
        self._indexed = len(token_ids)

    def after(self, before: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(tokens that are the same, what followed), longest first."""
        for length in LENGTHS:
            if length <= len(before):
                token_id = self._following.get(tuple(before[-length:]))
                if token_id is not None:
                    yield length, token_id
