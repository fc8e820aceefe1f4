"""Finds markers in text that comes in pieces. Shared by reasoning and tool-call parsers; knows neither."""

from __future__ import annotations

from collections.abc import Sequence


def overlap(text: str, markers: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that a marker may begin with: it must wait for more text."""
    longest = max(map(len, markers), default=0) - 1
    for length in range(min(len(text), longest), 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) and len(marker) > length for marker in markers):
            return length
    return 0


def earliest(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """(index, marker) of the first marker in `text`; of two at the same place, the longer one."""
    found = [(index, -len(marker), marker) for marker in markers if (index := text.find(marker)) >= 0]
    if not found:
        return None
    index, _, marker = min(found)
    return index, marker


def may_begin(text: str, markers: Sequence[str]) -> bool:
    """Whether `text` is a proper beginning of a marker, the empty text included."""
    return any(marker.startswith(text) and len(marker) > len(text) for marker in markers)
