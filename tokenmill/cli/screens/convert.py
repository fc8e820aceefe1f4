"""The screens of `tokenmill convert`: what was written and whether anything was lost; merged and extracted adapters."""

from __future__ import annotations

from tokenmill.cli.render.screen import Bar, Cell, Facts, Lines, Result, Screen, Section, Table, left, right
from tokenmill.cli.render.units import count, percent, plain_number, size
from tokenmill.cli.screens.quantize import quantize_screen

_LOSSES, _MODULES = 8, 12


def convert_screen(result: Result) -> Screen:
    lost = result["lost"]
    verdict = "lossless" if result["lossless"] else f"{len(lost)} tensors lost precision"
    headline = f"Wrote {result['path']}: {result['format']}, {size(result['bytes'])}, {verdict}"
    rows = [(name, count(number)) for name, number in result["types"].items()]
    sections: list[Section] = [Table("", (left("from and to"), right("tensors")), rows)]
    notes = [Cell(f"{each['name']}: {'; '.join(each['lost'])}", "warning") for each in lost[:_LOSSES]]
    return Screen(headline, "good" if result["lossless"] else "warning", sections, notes)


def merge_screen(result: Result, model: str) -> Screen:
    adapters = Facts(
        f"Merged into {model}",
        [(each["path"], f"weight {each['weight']:g}") for each in result["adapters"]]
        + [("tensors changed", count(result["merged_tensors"]))],
    )
    if "lossless" in result:
        screen = convert_screen(result)
        notes = list(screen.notes)
        if result["base_is_quantized"]:
            notes.append(Cell("the base is quantized, these are floats: --method rounds them again", "dim"))
        return Screen(screen.headline, screen.tone, [adapters, *screen.sections], notes)
    screen = quantize_screen(result, f"{model} with its adapters")
    return Screen(screen.headline, screen.tone, [adapters, *_cost(result), *screen.sections], screen.notes)


def _cost(result: Result) -> list[Section]:
    """What rounding the merged weights cost, beside what the adapter changes."""
    measured, effect = result["fidelity"], result["adapter_effect"]
    if not effect:
        return []
    rows = [
        ("base plus adapter, unmerged", plain_number(measured["reference_perplexity"]), "0"),
        ("merged and quantized", plain_number(measured["perplexity"]), f"{measured['kld_mean']:.4g}"),
        ("base without the adapter", plain_number(effect["perplexity"]), f"{effect['kld_mean']:.4g}"),
    ]
    columns = (left(""), right("perplexity"), right("divergence from unmerged, nats"))
    return [Table(f"Measured on {effect['text']}", columns, rows)]


def extract_screen(result: Result, base: str) -> Screen:
    headline = (
        f"Wrote {result['path']}: rank {result['rank']}, {size(result['bytes'])}, "
        f"{percent(result['energy'], 1)} of the difference kept"
    )
    least = sorted(result["modules"], key=lambda each: each["energy"])[:_MODULES]
    rows = [
        (each["name"], str(each["rank"]), f"{each['difference']:.3g}", percent(each["energy"], 1), Bar(each["energy"]))
        for each in least
    ]
    columns = (left("module"), right("rank"), right("difference / base"), right("energy kept"), left(""))
    title = f"{len(least)} of {len(result['modules'])} modules, the least well kept first"
    use = Lines("Use it", [f"tokenmill convert {base} OUT --adapter {result['path']}"])
    notes = []
    if result["left_out"]:
        named = ", ".join(result["left_out"][:3])
        notes.append(Cell(f"{len(result['left_out'])} vectors differ too and are not in it: {named}", "warning"))
    return Screen(headline, "good" if result["energy"] > 0.9 else "warning", [Table(title, columns, rows), use], notes)
