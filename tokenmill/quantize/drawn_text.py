"""Calibration sequences that the model draws itself.

Methods that learn fit what they calibrate on: a few ten thousand tokens are soon learned by heart, and what is won on
them is half lost on others. The unquantized model has as much text as one wants, of exactly the kind that it will be
asked to repeat (LLM-QAT, Liu et al. 2023): each sequence begins with a few tokens from anywhere in the calibration text
and goes on as the model draws it. Used by the job.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.quantize.calibration_text import CalibrationText
from tokenmill.quantize.forecast import Forecast, operations_per_second
from tokenmill.quantize.source import SourceModel
from tokenmill.quantize.workspace import Workspace

_BEGINNING = 8  # tokens of the calibration text
_SLOWNESS = 2.2  # seconds of drawing a token, in those that its products would take in a large batch


def draw_sequences(model: Path, sequences: Tensor, count: int, threads: int, device: str) -> Tensor:
    """`count` more sequences as long as `sequences` [n, length]; always the same ones."""
    from tokenmill.engine.llm import LLM
    from tokenmill.types import SamplingParams

    length = sequences.shape[1]
    beginnings = _beginnings(sequences, count)
    more = length - len(beginnings[0])
    params = [SamplingParams(max_tokens=more, ignore_eos=True, seed=seed) for seed in range(count)]
    with LLM(model, context=length, threads=threads or None, device=device, prefix_caching=False) as llm:
        drawn = [list(output.outputs[0].token_ids) for output in llm.generate(beginnings, params)]
    return torch.tensor([[*begin, *rest] for begin, rest in zip(beginnings, drawn, strict=True)])


def with_drawn(
    text: CalibrationText | None, model: Path, workspace: Workspace, count: int, threads: int, device: str
) -> CalibrationText | None:
    """The text and `count` drawn sequences; a resumed job has those of the first time."""
    if text is None or not count:
        return text
    path = workspace.learned("drawn")
    if not path.exists():
        workspace.save(path, {"ids": draw_sequences(model, text.sequences, count, threads, device)})
    both = torch.cat([text.sequences, load_file(path)["ids"]])
    return replace(text, sequences=both, origin=f"{text.origin}, {count} of them drawn by the model itself")


def with_drawing(
    forecast: Forecast, source: SourceModel, calibrates: bool, tokens: int, device: torch.device
) -> Forecast:
    """The forecast of a job that draws so many tokens first; one that does not calibrate would never use them."""
    if not calibrates:
        raise UserError("--calibration-drawn: this method uses no calibration text", "leave it out")
    d = source.description
    weights = sum(out * width for out, width in map(source.shape, source.layer_linears()))
    operations = _SLOWNESS * 2.0 * tokens * (weights + d.vocab_size * d.hidden_size)
    return replace(forecast, seconds=forecast.seconds + operations / operations_per_second(device))


def _beginnings(sequences: Tensor, count: int) -> list[list[int]]:
    """From random places; a token that begins every sequence begins these too."""
    always = [int(sequences[0, 0])] if bool((sequences[:, 0] == sequences[0, 0]).all()) else []
    inside = sequences[:, len(always) :]
    size = max(1, min(_BEGINNING, sequences.shape[1] // 2) - len(always))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(inside.shape[0], (count,), generator=generator)
    starts = torch.randint(inside.shape[1] - size + 1, (count,), generator=generator)
    places = zip(rows.tolist(), starts.tolist(), strict=True)
    return [[*always, *inside[row, start : start + size].tolist()] for row, start in places]
