"""Mixed precision inside a job: one pass over the float model for sensitivities, then a width for every linear.

The choice is kept in the workspace, so that a resumed job continues with the same widths. The arithmetic is in
mixed.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.model.formats.files.base import FileFormat
from tokenmill.quantize.calibrate import CalibratedBlock, HiddenStates
from tokenmill.quantize.mixed import WIDTHS, Sensitivity, budget_bytes, choose_widths, measure_block
from tokenmill.quantize.recipe import Recipe
from tokenmill.quantize.source import SourceModel
from tokenmill.quantize.workspace import Workspace

_log = get_logger(__name__)
_SEQUENCES = 4


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
    shapes = {name: source.shape(name) for name in recipe.scheme_of}
    widths = [
        bits
        for bits in WIDTHS
        if not any(
            file_format.refuses(replace(recipe.scheme_of[name], bits=bits), shape) for name, shape in shapes.items()
        )
    ]
    if file_format.one_scheme or len(widths) < 2:
        raise UserError(f"{file_format.name} holds one width only", "write mixed precision as compressed-tensors")
    count = min(_SEQUENCES, sequences.shape[0])
    chosen = sequences[torch.arange(count) * sequences.shape[0] // count]
    states = HiddenStates(source.embed(chosen), 1)
    measured: list[Sensitivity] = []
    for index in range(source.num_blocks):
        block = CalibratedBlock(source, index, states, device)
        measured += measure_block(block, recipe.scheme_of, widths, count)
        block.advance()
    return choose_widths(measured, recipe.scheme, budget_bytes(measured, recipe.scheme, recipe.average_bits))
