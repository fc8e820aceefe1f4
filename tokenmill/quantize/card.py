"""The model card written beside quantized weights: recipe, hashes, measured quality, error of each layer.

Holds nothing that differs between two runs of the same job (no times, no machine), so that a resumed job's output is
identical. Used by the job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill import __version__
from tokenmill.quantize.block_job import LayerReport


@dataclass(frozen=True, slots=True)
class CardContent:
    source_name: str
    source_digests: Mapping[str, str]
    recipe: Mapping[str, Any]
    format_name: str
    dtype: str
    bits_per_weight: float
    calibration: str  # description of the calibration data
    digests: Mapping[str, str]
    layers: Sequence[LayerReport]
    gate: Mapping[str, Any] | None  # None: not measured
    gate_text: str


def write_card(path: Path, content: CardContent) -> None:
    path.write_text(render_card(content), encoding="utf-8")


def render_card(content: CardContent) -> str:
    recipe = content.recipe
    lines = [
        "---",
        "library_name: transformers",
        "tags:",
        f"- {content.format_name}",
        f"- {recipe['method']}",
        "---",
        "",
        f"# {content.source_name}, quantized with {recipe['method']}",
        "",
        f"Made by tokenmill {__version__} from {content.source_name}; {content.bits_per_weight:.3f} bits per weight in "
        f"the quantized matrices, stored as {content.format_name}. Embeddings, norms and the head are {content.dtype}.",
        "",
        "## Measured",
        "",
        *_measured(content),
        "",
        "## Recipe",
        "",
        f"Calibration: {content.calibration}.",
        "",
        "```json",
        json.dumps(recipe, indent=2),
        "```",
        "",
        "## Hashes (SHA-256)",
        "",
        "| File | SHA-256 |",
        "|---|---|",
        *(f"| {name} | `{digest}` |" for name, digest in content.digests.items()),
        *(f"| source: {name} | `{digest}` |" for name, digest in content.source_digests.items()),
        "",
        "## Layers",
        "",
        "Relative error is |W - W'| / |W| of the weights, after the recipe's transforms.",
        "",
        "| Layer | Type | Relative error |",
        "|---|---|---|",
        *(f"| {layer.name} | {layer.type_name} | {layer.relative_error:.5f} |" for layer in content.layers),
        "",
    ]
    return "\n".join(lines)


def _measured(content: CardContent) -> list[str]:
    if content.gate is None:
        return ["Not measured: the quality gate was switched off (`--no-gate`)."]
    rows = [(name, value) for name, value in content.gate.items() if isinstance(value, int | float)]
    return [
        f"Against the source, on {content.gate_text}:",
        "",
        "| Measure | Value |",
        "|---|---|",
        *(f"| {name.replace('_', ' ')} | {value:.6g} |" for name, value in rows),
    ]
