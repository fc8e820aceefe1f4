"""What a draft model's pages hold, against a memory that remembers every slot."""

from __future__ import annotations

import random

from tokenmill.runtime.speculation.page_contents import PageContents

_SIZE = 3


class _Memory:
    """Each slot holds the whole prefix that was written there."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def write(self, tokens: list[int], begin: int, table: list[int]) -> None:
        for place in range(begin, len(tokens)):
            self.slots[table[place // _SIZE], place % _SIZE] = tuple(tokens[: place + 1])

    def num_valid(self, tokens: list[int], table: list[int]) -> int:
        for place in range(len(tokens)):
            if self.slots.get((table[place // _SIZE], place % _SIZE)) != tuple(tokens[: place + 1]):
                return place
        return len(tokens)


def test_nothing_stale_is_trusted_and_nothing_valid_is_lost() -> None:
    """Sequences with shared beginnings on tables that reuse pages, continued, cut back and rewritten at random."""
    draw = random.Random(6)
    contents, memory = PageContents(_SIZE), _Memory()
    stem = [draw.randrange(4) for _ in range(12)]
    kept = 0
    for _ in range(2000):
        tokens = stem[: draw.randrange(13)] + [draw.randrange(4) for _ in range(draw.randrange(6))]
        first = draw.randrange(3)  # tables overlap: the same page at the same or at another index
        table = list(range(first, first + 8))
        valid = contents.num_valid(tokens, table)
        assert valid <= memory.num_valid(tokens, table)
        kept += valid
        contents.write(tokens, valid, table)
        memory.write(tokens, valid, table)
        assert contents.num_valid(tokens, table) == len(tokens)
    assert kept > 2000


def test_drafted_tokens_count_as_far_as_they_were_accepted() -> None:
    contents, table = PageContents(4), [7, 8, 9]
    contents.write([1, 2, 3, 4, 5, 60, 61], 0, table)  # 60 and 61 were drafted
    assert contents.num_valid([1, 2, 3, 4, 5, 60, 99, 98], table) == 6
    contents.write([1, 2, 3, 4, 5, 60, 99, 98, 97], 6, table)
    assert contents.num_valid([1, 2, 3, 4, 5, 60, 99, 98, 97, 96], table) == 9
