"""The screen of `tokenmill pull`."""

from __future__ import annotations

from tokenmill.cli.render.screen import Cell, Facts, Result, Screen
from tokenmill.cli.render.units import size


def pull_screen(result: Result, model: str) -> Screen:
    rows = [("path", result["path"]), ("source", Cell(result["source"], "dim"))]
    return Screen(f"{model} is ready: {size(result['bytes'])}", "good", [Facts("", rows)])
