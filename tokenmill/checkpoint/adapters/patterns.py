"""Patterns of module names in adapter configs (`rank_pattern`, `alpha_pattern`), matched in bounded time.

PEFT takes them as regular expressions of Python, whose engine may try exponentially many ways: a config from anywhere
could hang the loader. Here a pattern is a tree, and each part maps the set of places where it may begin to the set
where it may end, so that nothing is tried twice; a pattern that would still take too long is refused. Read is what
names of modules need: texts, sets, groups, alternatives, repetitions, anchors; references and looking around are not.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_PATTERN = 256  # characters: names are shorter
_MAX_DEPTH = 16
_MAX_STEPS = 200_000  # places looked at: milliseconds
_MAX_REPEATS = 256
_SETS = {"d": r"\d", "D": r"\D", "w": r"\w", "W": r"\W", "s": r"\s", "S": r"\S"}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_COUNTED = re.compile(r"\{(\d*)(,?)(\d*)\}")

# (matcher, places) -> places where it may end
Part = Callable[["_Run", frozenset[int]], frozenset[int]]


class PatternError(ValueError):
    """A pattern that cannot be read, or not matched in bounded time."""


def matches_tail(pattern: str, name: str) -> bool:
    """Whether `(.*\\.)?(pattern)$` matches the name from its beginning, as PEFT asks. Raises PatternError."""
    if len(pattern) > MAX_PATTERN:
        raise PatternError(f"it has more than {MAX_PATTERN} characters")
    part = _Reader(pattern).whole()
    begins = frozenset({0, *(at + 1 for at, char in enumerate(name) if char == "." and "\n" not in name[:at])})
    run = _Run(name)
    return any(run.at_end(place) for place in part(run, begins))


class _Run:
    """One name being matched, and the steps that are left for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._left = _MAX_STEPS

    def spend(self, places: frozenset[int]) -> None:
        self._left -= 1 + len(places)
        if self._left < 0:
            raise PatternError("it takes too long to match")

    def at_end(self, place: int) -> bool:
        return place == len(self.name) or (place == len(self.name) - 1 and self.name[place] == "\n")


def _char(accepts: Callable[[str], bool]) -> Part:
    def part(run: _Run, places: frozenset[int]) -> frozenset[int]:
        run.spend(places)
        return frozenset(at + 1 for at in places if at < len(run.name) and accepts(run.name[at]))

    return part


def _where(holds: Callable[[_Run, int], bool]) -> Part:
    def part(run: _Run, places: frozenset[int]) -> frozenset[int]:
        run.spend(places)
        return frozenset(at for at in places if holds(run, at))

    return part


def _sequence(parts: list[Part]) -> Part:
    def part(run: _Run, places: frozenset[int]) -> frozenset[int]:
        for each in parts:
            places = each(run, places)
            if not places:
                break
        return places

    return part


def _either(parts: list[Part]) -> Part:
    def part(run: _Run, places: frozenset[int]) -> frozenset[int]:
        return frozenset().union(*(each(run, places) for each in parts))

    return part if len(parts) > 1 else parts[0]


def _repeated(body: Part, low: int, high: int | None) -> Part:
    def part(run: _Run, places: frozenset[int]) -> frozenset[int]:
        for _ in range(low):
            places = body(run, places)
        found = news = places
        count = low
        while news and (high is None or count < high):
            news = body(run, news) - found  # where it was before, it goes on as before
            found, count = found | news, count + 1
        return found

    return part


class _Reader:
    """Pattern -> part, by recursive descent."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0

    def whole(self) -> Part:
        part = self._alternatives()
        if self._at < len(self._text):
            raise PatternError("a parenthesis is closed that was not opened")
        return part

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        if self._at >= len(self._text):
            raise PatternError("it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _alternatives(self) -> Part:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError(f"it has more than {_MAX_DEPTH} groups inside each other")
        found = [self._one_after_the_other()]
        while self._peek() == "|":
            self._at += 1
            found.append(self._one_after_the_other())
        self._depth -= 1
        return _either(found)

    def _one_after_the_other(self) -> Part:
        parts: list[Part] = []
        while self._peek() not in ("", "|", ")"):
            begin = self._peek()
            parts.append(self._with_repeats(self._atom(), begin not in "^$"))
        return _sequence(parts)

    def _with_repeats(self, body: Part, repeats: bool) -> Part:
        bounds = self._repeats()
        if bounds is None:
            return body
        if not repeats:
            raise PatternError("an anchor is repeated")
        if self._peek() == "+":  # possessive, of Python 3.11: gives up ways that others find
            raise PatternError("possessive repetitions are not supported")
        if self._peek() == "?":  # which way comes first does not matter here
            self._at += 1
        if self._repeats() is not None:
            raise PatternError("a repetition is repeated")
        return _repeated(body, *bounds)

    def _repeats(self) -> tuple[int, int | None] | None:
        char = self._peek()
        if char and char in "*+?":
            self._at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        counted = _COUNTED.match(self._text, self._at)
        if counted is None or counted[0] in ("{}", "{,}"):
            return None
        self._at = counted.end()
        low = int(counted[1] or 0)
        high = (int(counted[3]) if counted[3] else None) if counted[2] else low
        if low > _MAX_REPEATS or (high is not None and not low <= high <= _MAX_REPEATS):
            raise PatternError(f"a repetition counts to more than {_MAX_REPEATS}, or backwards")
        return low, high

    def _atom(self) -> Part:
        if self._repeats() is not None:
            raise PatternError("nothing stands before a repetition")
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return _char(self._set())
        if char == "\\":
            return self._escaped()
        if char == ".":
            return _char(lambda other: other != "\n")
        if char == "^":
            return _where(lambda _run, at: at == 0)
        if char == "$":
            return _where(lambda run, at: run.at_end(at))
        return _char(lambda other: other == char)

    def _group(self) -> Part:
        if self._peek() == "?":
            self._at += 1
            if self._take() != ":":
                raise PatternError("only plain groups are supported")
        part = self._alternatives()
        if self._peek() != ")":
            raise PatternError("a parenthesis is not closed")
        self._at += 1
        return part

    def _escaped(self) -> Part:
        char = self._take()
        if char in _SETS:
            accepts = re.compile(_SETS[char])
            return _char(lambda other: accepts.match(other) is not None)
        literal = _literal(char)
        return _char(lambda other: other == literal)

    def _set(self) -> Callable[[str], bool]:
        """As Python reads it: one set of characters cannot take long."""
        begin = self._at
        self._at += self._peek() == "^"
        self._at += self._peek() == "]"
        while (char := self._take()) != "]":
            if char == "\\" and (escaped := self._take()) not in _SETS:
                _literal(escaped)
        try:
            accepts = re.compile(f"[{self._text[begin : self._at]}")
        except (re.error, FutureWarning) as error:
            raise PatternError(str(error)) from None
        return lambda other: accepts.match(other) is not None


def _literal(char: str) -> str:
    if char in _CONTROLS:
        return _CONTROLS[char]
    if char.isascii() and char.isalnum():
        raise PatternError(f"\\{char} is not supported")
    return char
