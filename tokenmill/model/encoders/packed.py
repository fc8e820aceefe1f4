"""Texts of any lengths as one row of tokens, without padding.

Texts are sorted by length, longest first, so that those of equal length lie side by side: a group of them is a plain
[texts, length, ...] view of the packed tensors. Knows ids and places, no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Text:
    """What is computed for one text or pair. `second`: where the second text of a pair begins; 0: there is none."""

    token_ids: Sequence[int]
    second: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Texts [first, first + count) of a batch, all of one length; their tokens begin at `start`."""

    first: int
    count: int
    length: int
    start: int

    @property
    def end(self) -> int:
        return self.start + self.count * self.length


@dataclass(slots=True)
class PackedTexts:
    """T tokens of S texts, in the order of `order`: place -> number of the text as it was given."""

    order: list[int]
    groups: list[Group]
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, from 0 in each text
    types: Tensor | None  # [T] int64: 1 in the second text of a pair; None: all 0
    starts: Tensor  # [S + 1] int32
    max_length: int

    @property
    def num_texts(self) -> int:
        return len(self.order)


def pack(texts: Sequence[Text], device: torch.device) -> PackedTexts:
    """At least one text, none of them empty."""
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number].token_ids))
    lengths = [len(texts[number].token_ids) for number in order]
    groups, first, start = [], 0, 0
    for length, same in groupby(lengths):
        count = len(list(same))
        groups.append(Group(first, count, length, start))
        first, start = first + count, start + count * length
    ids: list[int] = []
    for number in order:
        ids += texts[number].token_ids
    counted = torch.arange(max(lengths))
    positions = torch.cat([counted[: group.length].repeat(group.count) for group in groups])
    types = None
    if any(text.second for text in texts):
        seconds = torch.tensor([texts[number].second or lengths[place] for place, number in enumerate(order)])
        types = (positions >= torch.repeat_interleave(seconds, torch.tensor(lengths))).long().to(device)
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(lengths, dtype=torch.int32), 0, out=starts[1:])
    token_ids = torch.tensor(ids, dtype=torch.int64)
    return PackedTexts(
        order, groups, token_ids.to(device), positions.to(device), types, starts.to(device), lengths[0]
    )  # fmt: skip


def split_by_tokens(texts: Sequence[Text], max_tokens: int) -> list[list[int]]:
    """Numbers of texts in batches of about equal length, longest first, of at most `max_tokens` tokens each where a
    single text does not have more."""
    batches: list[list[int]] = []
    room = 0
    for number in sorted(range(len(texts)), key=lambda number: -len(texts[number].token_ids)):
        length = len(texts[number].token_ids)
        if not batches or length > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(number)
        room -= length
    return batches
