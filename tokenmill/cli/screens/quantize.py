"""The screen of `tokenmill quantize`: how small it became and what it lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.cli.render.screen import Bar, Cell, Facts, Result, Screen, Section, Table, Tone, Value, left
from tokenmill.cli.render.units import change, count, duration, percent, plain_number, size
from tokenmill.cli.screens.evaluation import loss_tone


def quantize_screen(result: Result, model: str) -> Screen:
    fidelity = result["fidelity"]
    loss = fidelity.get("quality_loss")
    lost = f", perplexity {change(loss)}" if loss is not None else ", quality not measured"
    headline = (
        f"{model}: {size(result['bytes'])} at {result['bits_per_weight']:.2f} bits per weight ({result['method']})"
        f"{lost}, written to {result['path']}"
    )
    sections: list[Section] = [_quality(fidelity)] if loss is not None else []
    sections.append(_effort(result))
    tone: Tone = "warning" if loss is None else loss_tone(loss)
    return Screen(headline, tone, sections, _notes(result, model))


def _quality(fidelity: Mapping[str, Any]) -> Table:
    loss, agreement = fidelity["quality_loss"], fidelity["top1_agreement"]
    low, high = fidelity["perplexity_ratio_low"] - 1, fidelity["perplexity_ratio_high"] - 1
    rows: list[tuple[Value, ...]] = [
        (
            "perplexity",
            f"{plain_number(fidelity['perplexity'])} against {plain_number(fidelity['reference_perplexity'])}",
            Cell(f"{change(loss)} (95%: {change(low)} to {change(high)})", loss_tone(loss)),
        ),
        ("same top token", percent(agreement, 1), Bar(agreement)),
        (
            "KL divergence",
            f"{plain_number(fidelity['kld_mean'])} on average",
            f"{plain_number(fidelity['kld_p99'])} at p99",
        ),
    ]
    if fidelity.get("weight_error_mean") is not None:
        worst = f"{percent(fidelity['weight_error_worst'], 1)} in {fidelity['weight_error_worst_layer']}"
        rows.append(("error of the weights", f"{percent(fidelity['weight_error_mean'], 1)} on average", worst))
    title = (
        f"What it lost, on {count(fidelity['tokens'])} tokens: gate {fidelity['gate']} (limits: perplexity "
        f"{change(fidelity['max_quality_loss'])}, divergence {plain_number(fidelity['max_kld'])} nats)"
    )
    return Table(title, (left(""), left(""), left("")), rows)


def _effort(result: Result) -> Facts:
    memory = f"{size(result['peak_memory_bytes'])} of memory"
    if result.get("peak_device_bytes"):
        memory += f", {size(result['peak_device_bytes'])} of GPU memory"
    on = f" on {result['device']}" if result.get("device") else ""
    rows: list[tuple[str, Value]] = [
        ("format", " ".join(filter(None, (result["format"], result.get("type"))))),
        ("took", f"{duration(result['seconds'])}{on}, {memory}"),
    ]
    for key, what in (("tuned", "scales"), ("trained", "codes")):
        if learned := result["fidelity"].get(key):
            gain = f"divergence {plain_number(learned['before'])} to {plain_number(learned['after'])}"
            gain += f" in {learned['steps']} steps"
            rows.append((what, gain if learned["kept"] else f"not kept: {gain}"))
    if result.get("resumed_blocks"):
        rows.append(("resumed", f"{count(result['resumed_blocks'])} blocks were done before"))
    return Facts("How", rows)


def _notes(result: Result, model: str) -> list[Cell]:
    fidelity = result["fidelity"]
    notes = []
    if fidelity.get("nan_count"):
        notes.append(Cell(f"{count(fidelity['nan_count'])} tokens were not finite", "bad"))
    if fidelity.get("quality_loss") is None:
        text = f"measure it: tokenmill eval divergence {result['path']} --reference {model} --text FILE"
        notes.append(Cell(text, "warning"))
    return notes
