"""Mixed precision inside a job: one pass over the float model for sensitivities, then a width for every linear.

The choice is kept in the workspace, so that a resumed job continues with the same widths. The arithmetic is in
mixed.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.model.formats.files.base import FileFormat
from tokenmill.quantize.calibrate import CalibratedBlock, HiddenStates
from tokenmill.quantize.divergence import BlockWeights, DivergenceProbe, free_bytes
from tokenmill.quantize.forecast import operations_per_second
from tokenmill.quantize.mixed import Sensitivity, budget_bytes, choose_widths, measure_block
from tokenmill.quantize.recipe import Recipe
from tokenmill.quantize.source import SourceModel
from tokenmill.quantize.workspace import Workspace

_log = get_logger(__name__)
_SEQUENCES, _LENGTH = 4, 64  # of calibration text that widths are measured on
_MEASURING_SECONDS = 300.0


def choose_schemes(
    recipe: Recipe,
    source: SourceModel,
    sequences: Tensor,
    file_format: type[FileFormat],
    workspace: Workspace,
    device: torch.device,
) -> Recipe:
    """The recipe with a scheme of its own for each linear, with the recipe's average width."""
    widths = workspace.read_json("widths")
    if widths is None:
        widths = _choose(recipe, source, sequences, file_format, device)
        workspace.write_json("widths", widths)
    counts = {bits: sum(width == bits for width in widths.values()) for bits in sorted(set(widths.values()))}
    _log.info("mixed precision: %s", ", ".join(f"{count} x {bits} bits" for bits, count in counts.items()))
    schemes = {name: replace(scheme, bits=widths[name]) for name, scheme in recipe.scheme_of.items()}
    return replace(recipe, scheme_of=schemes)


def _choose(
    recipe: Recipe, source: SourceModel, sequences: Tensor, file_format: type[FileFormat], device: torch.device
) -> dict[str, int]:
    assert recipe.average_bits is not None
    widths = _possible_widths(recipe, source, file_format)
    count = min(_SEQUENCES, sequences.shape[0])
    chosen = sequences[torch.arange(count) * sequences.shape[0] // count, :_LENGTH]
    importance = _importance(source, chosen, device)
    probe = DivergenceProbe(source, chosen, BlockWeights(source, free_bytes() // 2))
    ran = _widths_to_run(source, recipe.average_bits, widths, chosen.numel())
    measured: list[Sensitivity] = []
    for index in range(source.num_blocks):
        measured += measure_block(probe, index, recipe.scheme_of, widths, ran, importance)
    return choose_widths(measured, recipe.scheme, budget_bytes(measured, recipe.scheme, recipe.average_bits))


def _possible_widths(recipe: Recipe, source: SourceModel, file_format: type[FileFormat]) -> list[int]:
    shapes = {name: source.shape(name) for name in recipe.scheme_of}
    widths = [
        bits
        for bits in recipe.widths
        if not any(
            file_format.refuses(replace(recipe.scheme_of[name], bits=bits), shape) for name, shape in shapes.items()
        )
    ]
    if file_format.one_scheme or len(widths) < 2:
        raise UserError(f"{file_format.name} holds one width only", "write mixed precision as compressed-tensors")
    return widths


def _widths_to_run(source: SourceModel, average: float, widths: Sequence[int], num_tokens: int) -> list[int]:
    """The widths around the average, nearest first: as many as can be measured within minutes, three at most."""
    near = sorted(widths, key=lambda width: (abs(width - average), -width))
    weights = sum(out * width for out, width in map(source.shape, source.layer_linears()))
    head = source.description.vocab_size * source.description.hidden_size
    groups = sum(len(source.groups(index)) for index in range(source.num_blocks))
    seconds = 2.0 * groups * num_tokens * (0.5 * weights + head) / operations_per_second(torch.device("cpu"))
    _log.info("mixed precision: measuring a width takes about %.0f s", seconds)
    return near[: max(1, min(3, int(_MEASURING_SECONDS / max(seconds, 1e-9))))]


def _importance(source: SourceModel, sequences: Tensor, device: torch.device) -> dict[str, Tensor]:
    """The mean square of each linear's input."""
    states = HiddenStates(source.embed(sequences), sequences.shape[0])
    found: dict[str, Tensor] = {}
    for index in range(source.num_blocks):
        surveyed = CalibratedBlock(source, index, states, device).survey(("mean_square",))
        found |= {name: each.mean_square.cpu() for name, each in surveyed.items() if each.mean_square is not None}
    return found
