"""Draws a `Screen` with rich: colour and a framed headline on a terminal, stable plain text of 100 columns elsewhere.

A pipe gets the same words in the same order in ASCII, without escape codes, frames or trailing blanks. NO_COLOR is
honoured (by rich). Called by cli/output.py and by the program that makes the pictures of the documentation.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table as Grid
from rich.text import Text

from tokenmill.cli.render.screen import Bar, Cell, Column, Facts, Lines, Screen, Section, Table, Tone, Value

PLAIN_WIDTH = 100
_WIDEST = 120
_BAR_WIDTH = 30
_MORE = "All figures: --json"
_STYLES: dict[Tone, str] = {
    "plain": "",
    "strong": "bold",
    "good": "green",
    "warning": "yellow",
    "bad": "red",
    "dim": "dim",
}
_MARKS: dict[Tone, str] = {"warning": "!", "bad": "x", "good": "+"}


def show(screen: Screen, file: TextIO) -> None:
    """Print on `file`, as a terminal or as a pipe."""
    if file.isatty():
        console = Console(file=file, highlight=False, emoji=False, markup=False)
        console.width = min(console.width, _WIDEST)
        console.print(draw(screen, rich=not console.options.ascii_only), crop=False)
    else:
        file.write(as_text(screen))
        file.flush()


def as_text(screen: Screen, width: int = PLAIN_WIDTH) -> str:
    """The screen as a pipe gets it."""
    page = io.StringIO()
    console = Console(
        file=page, width=width, color_system=None, force_terminal=False, highlight=False, emoji=False, markup=False
    )
    console.print(draw(screen, rich=False), crop=False)
    return "".join(f"{line.rstrip()}\n" for line in page.getvalue().splitlines())


def draw(screen: Screen, rich: bool) -> RenderableType:
    """`rich`: with a frame and line characters."""
    headline = Text(screen.headline, style=f"bold {_STYLES[screen.tone]}".strip())
    parts: list[RenderableType] = [
        Panel(headline, box=box.ROUNDED, border_style=_STYLES[screen.tone] or "dim", expand=False) if rich else headline
    ]
    for section in screen.sections:
        parts += [Text(""), *_draw_section(section, rich)]
    if screen.notes:
        parts += [Text(""), _draw_notes(screen.notes)]
    parts += [Text(""), Text(_MORE, style="dim")]
    return Group(*parts)


def _draw_section(section: Section, rich: bool) -> list[RenderableType]:
    heading = [Text(section.title, style="bold")] if section.title else []
    if isinstance(section, Lines):
        # no_wrap: a command is copied as one line, however long
        lines = [Text(f"  {line}", no_wrap=True, overflow="ignore") for line in section.lines]
        return [*heading, *lines]
    table = _draw_facts(section, rich) if isinstance(section, Facts) else _draw_table(section, rich)
    return [*heading, Padding(table, (0, 0, 0, 2))]


def _draw_facts(section: Facts, rich: bool) -> Grid:
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in section.rows:
        grid.add_row(Text(label, style="dim"), _draw_value(value, rich))
    return grid


def _draw_table(section: Table, rich: bool) -> Grid:
    named = any(column.name for column in section.columns)
    grid = Grid(box=None, show_header=named, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for column in section.columns:
        _add_column(grid, column)
    for row in section.rows:
        grid.add_row(*(_draw_value(value, rich) for value in row))
    return grid


def _add_column(grid: Grid, column: Column) -> None:
    justify = "right" if column.right else "left"
    grid.add_column(Text(column.name), justify=justify, no_wrap=column.right, overflow="fold")  # type: ignore[arg-type]


def _draw_value(value: Value, rich: bool) -> Text:
    if isinstance(value, Bar):
        return _draw_bar(value, rich)
    cell = value if isinstance(value, Cell) else Cell(value)
    return Text(cell.text, style=_STYLES[cell.tone])


def _draw_bar(bar: Bar, rich: bool) -> Text:
    filled = min(_BAR_WIDTH, max(0, round(_BAR_WIDTH * bar.share)))
    if bar.share > 0:
        filled = max(1, filled)  # what exists is seen
    style = _STYLES[bar.tone] or "cyan"
    full, empty = ("━", "─") if rich else ("#", ".")
    return Text.assemble((full * filled, style), (empty * (_BAR_WIDTH - filled), "dim"))


def _draw_notes(notes: Sequence[Cell]) -> Grid:
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for note in notes:
        style = _STYLES[note.tone]
        grid.add_row(Text(_MARKS.get(note.tone, "-"), style=style), Text(note.text, style=style))
    return grid
