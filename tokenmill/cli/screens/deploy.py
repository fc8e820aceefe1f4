"""The screen of `tokenmill deploy --out`: what was written and what to run. Without --out the files are the answer."""

from __future__ import annotations

import shlex

from tokenmill.cli.render.screen import Cell, Lines, Result, Screen, Section
from tokenmill.cli.render.units import counted


def deploy_screen(result: Result, target: str) -> Screen:
    written = result["written"]
    headline = f"Wrote {counted(len(written), 'file')} for {target}: {shlex.join(result['command'][:3])} ..."
    sections: list[Section] = [Lines("Files", written)]
    if result["prepare"]:
        sections.append(Lines("First", result["prepare"]))
    sections.append(Lines("Each replica runs", [shlex.join(result["command"])]))
    return Screen(headline, "good", sections, [Cell(each, "warning") for each in result["notes"]])
