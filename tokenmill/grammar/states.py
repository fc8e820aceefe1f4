"""Where an output is in a grammar whose language is regular: regular expressions and lists of choices.

A state is known by the rest of the language, so that outputs in one state have the same tokens to go on with. None
where the output cannot be followed with certainty; the grammar library follows it in any case. Knows bytes, no tokens.
Called by kept_masks.py.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Protocol

from tokenmill.grammar.regex_parser import Unsupported, parse_regex
from tokenmill.grammar.regular import Regular, TooLarge, UnknownByte
from tokenmill.grammar.source import unanchored
from tokenmill.types import StructuredSpec

_MAX_SETS = 512  # of bytes
State = Any  # hashable, of its grammar


class States(Protocol):
    @property
    def start(self) -> State: ...

    def after(self, state: State, data: bytes) -> State | None: ...

    def may_be_forced(self, state: State) -> bool:
        """Whether it could be that there is one way only to write the next two bytes."""
        ...


def states_of(spec: StructuredSpec) -> States | None:
    """None for grammars that have none."""
    if spec.kind == "choice":
        return ChoiceStates(spec.choices)
    if spec.kind != "regex":
        return None
    try:
        return RegexStates(spec.text)
    except (Unsupported, TooLarge):
        return None


class RegexStates:
    """Numbers of nodes; what follows each of them is found out once."""

    def __init__(self, text: str) -> None:
        self._regular = Regular()
        self._lock = threading.Lock()  # around them
        start = parse_regex(unanchored(text), self._regular)
        self.start = start.number
        self._alike = _alike(list(dict.fromkeys(self._regular.byte_sets())))
        self._steps: dict[int, dict[int, int | None]] = {}  # by state and byte
        self._forced: dict[int, bool] = {}
        self._full = False

    def after(self, state: int, data: bytes) -> int | None:
        for byte in data.translate(self._alike):
            try:
                found = self._steps[state][byte]
            except KeyError:
                found = self._find(state, byte)
            if found is None:
                return None
            state = found
        return state

    def may_be_forced(self, state: int) -> bool:
        known = self._forced.get(state)
        if known is None:
            try:
                known = self._finds_forced(state)
            except TooLarge:
                known = True
            self._forced[state] = known
        return known

    def _finds_forced(self, state: int) -> bool:
        byte = self._only_byte(state)
        after = self.after(state, bytes([byte])) if byte is not None and byte >= 0 else None
        return byte is not None and (after is None or self._only_byte(after) is not None)

    def _only_byte(self, state: int) -> int | None:
        """The byte that alone is certain to be possible; None if there are others, -1 if none is."""
        node = self._regular.nodes[state]
        bits = 0 if node.nullable else self._regular.first_bytes(node)
        return None if node.nullable or bits.bit_count() > 1 else bits.bit_length() - 1

    def _find(self, state: int, byte: int) -> int | None:
        with self._lock:
            found = None
            try:
                if not self._full:
                    node = self._regular.after(self._regular.nodes[state], byte)
                    found = None if node is self._regular.empty else node.number
            except UnknownByte:
                pass
            except TooLarge:  # what is known so far stays
                self._full = True
            self._steps.setdefault(state, {})[byte] = found
        return found


class ChoiceStates:
    """(First, end, length): those of the sorted choices that begin with what was written, and how long that is."""

    def __init__(self, choices: Sequence[str]) -> None:
        self._choices = sorted({choice.encode() for choice in choices})
        self.start = (0, len(self._choices), 0)

    def after(self, state: tuple[int, int, int], data: bytes) -> tuple[int, int, int] | None:
        first, end, length = state
        written = self._choices[first][:length] + data
        first = bisect_left(self._choices, written, first, end)
        # No byte of UTF-8 is 255: this is after all that begin with it.
        end = bisect_left(self._choices, written + b"\xff", first, end)
        return (first, end, len(written)) if first < end else None

    def may_be_forced(self, state: tuple[int, int, int]) -> bool:
        first, end, length = state
        one, other = self._choices[first], self._choices[end - 1]
        return len(one) >= length + 2 and one[: length + 2] == other[: length + 2]


def _alike(sets: Sequence[int]) -> bytes:
    """By byte: the first one that is in the same of these sets, and also within or beyond ASCII."""
    if len(sets) > _MAX_SETS:
        raise TooLarge
    representatives: dict[tuple[int, ...], int] = {}
    kinds = [(byte >> 7, *(bits >> byte & 1 for bits in sets)) for byte in range(256)]
    return bytes(representatives.setdefault(kind, byte) for byte, kind in enumerate(kinds))
