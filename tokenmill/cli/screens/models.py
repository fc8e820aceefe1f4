"""The screens of `list`, `rm`, `ps` and `stop`."""

from __future__ import annotations

from tokenmill.cli.render.screen import Cell, Result, Screen, Table, Tone, left, right
from tokenmill.cli.render.units import counted, size

_TONES: dict[str, Tone] = {"loaded": "good", "unloaded": "dim", "asleep": "dim"}


def list_screen(result: Result) -> Screen:
    models = result["models"]
    rows = [(each["name"], size(each["bytes"]), Cell(each["source"], "dim")) for each in models]
    table = Table("", (left("name"), right("size"), left("source")), rows)
    if not models:
        return Screen("No models on this disk", "plain", [], [Cell("`tokenmill pull MODEL` fetches one", "dim")])
    return Screen(f"{counted(len(models), 'model')} on this disk", "plain", [table])


def removed_screen(result: Result) -> Screen:
    removed = result["removed"]
    return Screen(f"Deleted {', '.join(removed)}: {size(sum(removed.values()))}", "good")


def ps_screen(result: Result) -> Screen:
    models = result["models"]
    rows = [
        (
            each["name"],
            Cell(each["state"], _TONES.get(each["state"], "warning")),
            size(each["bytes"]) if each["bytes"] else "-",
            str(each["context"] or "-"),
            Cell(str(each["expires_at"] or "-"), "dim"),
        )
        for each in models
    ]
    columns = (left("name"), left("state"), right("size"), right("context"), left("until"))
    return Screen(f"{counted(len(models), 'model')} at {result['url']}", "plain", [Table("", columns, rows)])


def stopped_screen(result: Result) -> Screen:
    return Screen(f"{result['stopped']} is unloaded", "good")
