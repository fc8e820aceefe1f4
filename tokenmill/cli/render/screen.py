"""The parts a screen is made of: a headline, sections, notes. Plain values without any drawing.

A verb's screen (cli/screens) is a pure function from its result to a `Screen`; draw.py puts it on a terminal or into a
pipe. Tones carry meaning: good is a promise kept or a gain, warning an assumption or a limit, bad a refusal or a loss,
dim where a number comes from. Imports no rich, so that verbs start fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenmill.cli.render.units import percent

Result = Mapping[str, Any]
Tone = Literal["plain", "strong", "good", "warning", "bad", "dim"]


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Bar:
    """A share between 0 and 1, drawn as a horizontal bar."""

    share: float
    tone: Tone = "plain"


Value = str | Cell | Bar


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    right: bool = False  # numbers are right-aligned


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]


@dataclass(frozen=True, slots=True)
class Facts:
    """Labels with values, one a line."""

    title: str
    rows: Sequence[tuple[str, Value]]


@dataclass(frozen=True, slots=True)
class Lines:
    """Text to copy, such as a command: never wrapped."""

    title: str
    lines: Sequence[str]


Section = Table | Facts | Lines


@dataclass(frozen=True, slots=True)
class Screen:
    headline: str
    tone: Tone = "plain"
    sections: Sequence[Section] = ()
    notes: Sequence[Cell] = field(default=())  # reasons and warnings, last


def left(name: str) -> Column:
    return Column(name)


def right(name: str) -> Column:
    return Column(name, right=True)


def shares(title: str, parts: Sequence[tuple[str, float, str, Tone]]) -> Table:
    """Parts of a whole: (label, amount, amount as text, tone), with the share of each as a bar."""
    whole = sum(amount for _, amount, _, _ in parts) or 1.0
    rows: list[Sequence[Value]] = [
        (label, text, percent(amount / whole), Bar(amount / whole, tone)) for label, amount, text, tone in parts
    ]
    return Table(title, (left(""), right(""), right(""), left("")), rows)
