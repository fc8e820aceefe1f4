"""Finds special tokens in text before any other rule applies.

Tokens are tried longest first, each over what the longer ones left; this is what llama.cpp does, and differs from a
left-to-right scan only where two tokens overlap. Knows nothing about vocabularies. Called by gguf_tokenizer.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

_BLANKS = " \t\n\v\f\r"


@dataclass(frozen=True, slots=True)
class SpecialToken:
    text: str
    token_id: int
    eats_blanks_after: bool = False  # phi-3's tokens


class SpecialTokenSplitter:
    def __init__(self, tokens: Sequence[SpecialToken]) -> None:
        ordered = sorted((token for token in tokens if token.text), key=lambda token: -len(token.text.encode()))
        self._tokens = ordered
        self._by_head: dict[str, list[int]] = defaultdict(list)  # first two characters -> places in the order
        for index, token in enumerate(ordered):
            self._by_head[token.text[:2]].append(index)

    def split(self, text: str) -> list[str | int]:
        """The text as a list of plain strings (never empty ones) and ids of special tokens."""
        # Thousands of tokens share a few heads ("<u", "<s"): most are ruled out by one search.
        indices = sorted(index for head, group in self._by_head.items() if head in text for index in group)
        fragments: list[str | int] = [text] if text else []
        for index in indices:
            token = self._tokens[index]
            if token.text in text:
                fragments = [part for fragment in fragments for part in _cut(fragment, token)]
        return fragments


def _cut(fragment: str | int, token: SpecialToken) -> list[str | int]:
    if isinstance(fragment, int) or token.text not in fragment:
        return [fragment]
    parts: list[str | int] = []
    for index, part in enumerate(fragment.split(token.text)):
        if index:
            parts.append(token.token_id)
            if token.eats_blanks_after:
                part = part.lstrip(_BLANKS)
        if part:
            parts.append(part)
    return parts
