"""The screen of `tokenmill convert`: what was written and whether anything was lost."""

from __future__ import annotations

from tokenmill.cli.render.screen import Cell, Result, Screen, Section, Table, left, right
from tokenmill.cli.render.units import count, size

_LOSSES = 8


def convert_screen(result: Result) -> Screen:
    lost = result["lost"]
    verdict = "lossless" if result["lossless"] else f"{len(lost)} tensors lost precision"
    headline = f"Wrote {result['path']}: {result['format']}, {size(result['bytes'])}, {verdict}"
    rows = [(name, count(number)) for name, number in result["types"].items()]
    sections: list[Section] = [Table("", (left("from and to"), right("tensors")), rows)]
    notes = [Cell(f"{each['name']}: {'; '.join(each['lost'])}", "warning") for each in lost[:_LOSSES]]
    return Screen(headline, "good" if result["lossless"] else "warning", sections, notes)
