"""The screen of `tokenmill doctor`: can this machine run models, and what is in the way."""

from __future__ import annotations

from tokenmill.cli.render.screen import Bar, Cell, Facts, Result, Screen, Section, Table, Tone, Value, left, right
from tokenmill.cli.render.units import counted, percent, size

_MODELS = 8


def doctor_screen(result: Result) -> Screen:
    ready = result["verdict"].startswith("ready")
    sections: list[Section] = [_machine(result), _installation(result)]
    sections.append(_models(result))
    if result["network"]:
        rows = [
            (address, Cell(state, "good" if state == "ok" else "bad")) for address, state in result["network"].items()
        ]
        sections.append(Facts("Network", rows))
    tone: Tone = ("warning" if result["problems"] else "good") if ready else "bad"
    headline = result["verdict"][:1].upper() + result["verdict"][1:]
    return Screen(headline, tone, sections, [Cell(each, "warning") for each in result["problems"]])


def _machine(result: Result) -> Table:
    machine = result["machine"]
    total, available = machine["memory_bytes"], machine["available_bytes"]
    free = available / total if total else 0.0
    platform = f"{machine['system']} {machine['architecture']}"
    rows: list[tuple[Value, ...]] = [
        (Cell("processor", "dim"), f"{machine['cpu']}, {counted(machine['cores'], 'core')} ({platform})", ""),
        (
            Cell("memory in use", "dim"),
            f"{size(total - available)} of {size(total)} ({percent(1 - free)})",
            Bar(1 - free, "good" if free > 0.25 else "warning"),
        ),
        (Cell("free disk", "dim"), f"{size(result['free_disk_bytes'])} at {result['cache']}", ""),
    ]
    for number, gpu in enumerate(machine["gpus"] or ("none",)):
        rows.insert(1 + number, (Cell("GPU", "dim"), gpu, ""))
    return Table("Machine", (left(""), left(""), left("")), rows)


def _installation(result: Result) -> Facts:
    kernels, test = result["kernels"], result["self_test"]
    found = (
        Cell(f"{kernels['instruction_set']}, {counted(kernels['threads'], 'thread')}", "good")
        if kernels["available"]
        else Cell(f"not available: {kernels['reason']}", "bad")
    )
    if test["error"]:
        tested = Cell(f"{test['model']} failed: {test['error']}", "bad")
    elif test["model"]:
        tested = Cell(f"{test['model']} generated {counted(test['tokens'], 'token')}", "good")
    else:
        tested = Cell("no model to test with: try `tokenmill pull stories15m`", "warning")
    versions = f"tokenmill {result['tokenmill']}, Python {result['python']}, torch {result['torch']}"
    return Facts("Installation", [("versions", versions), ("C++ kernels", found), ("self test", tested)])


def _models(result: Result) -> Section:
    models = result["models"]
    if not models:
        return Facts("Models", [("", Cell("none in the cache yet: try `tokenmill pull smollm2`", "dim"))])
    rows = [(each["name"], size(each["bytes"]), _place(each["path"], result["cache"])) for each in models[:_MODELS]]
    if len(models) > _MODELS:
        rows.append((f"and {len(models) - _MODELS} more", "", Cell("", "dim")))
    return Table("Models in the cache", (left("name"), right("size"), left("path")), rows)


def _place(path: str, cache: str) -> Cell:
    """The path within the cache, which the screen has named already."""
    return Cell(path.removeprefix(f"{cache}/"), "dim")
