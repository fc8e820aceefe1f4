"""What a draft model's pages hold, page by page, so that it computes only what is missing.

A draft model keeps its keys and values in pages of its own, numbered by the target's page tables. Those tables change
without its knowledge: pages are shared, evicted and reused, and drafted tokens are rejected. Each page therefore
records which tokens were written to it after which prefix; what does not match is computed again. So no notice of
finished or preempted requests is needed, and stale keys are never attended to.
"""

from __future__ import annotations

from collections.abc import Sequence

_START = 0x5EED  # the hash of no tokens


class PageContents:
    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._pages: dict[int, tuple[int, list[int]]] = {}  # page -> (hash of the tokens before it, its tokens)

    def num_valid(self, token_ids: Sequence[int], table: Sequence[int]) -> int:
        """How many of these tokens, from the first on, are stored in the pages of `table`."""
        size, prefix = self._size, _START
        for number, page in enumerate(table):
            begin = number * size
            before, written = self._pages.get(page, (None, []))
            if before != prefix or begin >= len(token_ids):
                return min(begin, len(token_ids))
            wanted = token_ids[begin : begin + size]
            if written[: len(wanted)] != wanted or len(wanted) < size:
                return begin + _num_equal(written, wanted)
            prefix = _extend(prefix, written)
        return min(len(table) * size, len(token_ids))

    def write(self, token_ids: Sequence[int], begin: int, table: Sequence[int]) -> None:
        """The tokens from `begin` on are stored now; those before it were already."""
        size = self._size
        first = begin // size
        prefix = _START
        if first:
            prefix = _extend(*self._pages[table[first - 1]])
        for number in range(first, -(-len(token_ids) // size)):
            written = list(token_ids[number * size : (number + 1) * size])
            self._pages[table[number]] = (prefix, written)
            prefix = _extend(prefix, written)


def _extend(prefix: int, tokens: Sequence[int]) -> int:
    return hash((prefix, *tokens))


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
