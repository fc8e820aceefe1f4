"""Quantizes one block: transforms, solver, encoded tensors, and a report on each matrix.

Block in, tensors and report out; saves nothing. Knows file formats only through their base class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.model.formats.files.base import FileFormat
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.calibrate import CalibratedBlock
from tokenmill.quantize.recipe import Recipe
from tokenmill.quantize.source import narrow, stored_norm

# Vectors whose names have no ending, kept in float32: 16 bits would merge the biases that decide between experts.
_WHOLE_NAMES = (".e_score_correction_bias", ".sinks")
# The same of recurrent layers: an error in a decay grows with the length of the text.
_STATE_PARAMETERS = (".A_log", ".D", ".dt_bias", ".dt_proj.bias")


@dataclass(frozen=True, slots=True)
class LayerReport:
    name: str
    type_name: str
    num_weights: int
    num_bytes: int
    relative_error: float  # |W - quantized W| / |W|, after transforms


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedBlock:
    """A block as its solver left it: matrices in codes and scales, everything else as it computes."""

    matrices: Mapping[str, QuantizedMatrix]
    floats: Mapping[str, Tensor]
    linears: frozenset[str]  # of both
    kept: frozenset[str]
    of_states: frozenset[str]
    errors: Mapping[str, float]


@torch.no_grad()
def quantize_block(block: CalibratedBlock, recipe: Recipe) -> QuantizedBlock:
    """Transforms, then the solver. The block itself then computes as the file will."""
    names = frozenset(name for group in block.groups for name in group.names)
    scheme_of: Mapping[str, Scheme] = {name: recipe.scheme_of[name] for name in names if name in recipe.scheme_of}
    ordered = {name: scheme_of[name] for group in block.groups for name in group.names if name in scheme_of}
    matrices: Mapping[str, QuantizedMatrix] = {}
    with torch.enable_grad():  # methods that learn disable it themselves where they do not need it
        for transform in recipe.transforms:
            if ordered or transform.turns_states:  # what other blocks hand over is turned, whatever is left out here
                transform.apply(block, ordered)
        block.begin_rounding()
        if ordered:
            block.watch_errors()
            matrices = recipe.solver.solve(block, ordered)
        block.advance_float()
    assert set(matrices) == set(ordered), sorted(set(ordered) ^ set(matrices))
    for name, matrix in matrices.items():
        if not bool(torch.isfinite(matrix.scales).all()):
            raise UserError(f"{name} became NaN or infinite", "give other calibration text or another method")
    return QuantizedBlock(
        {name: matrix.to("cpu") for name, matrix in matrices.items()},
        {name: value.cpu() for name, value in block.tensors.items() if name not in matrices},
        names,
        block.kept,
        block.of_states,
        block.errors,
    )


def encode_block(
    block: QuantizedBlock, file_format: type[FileFormat], dtype: torch.dtype, norm_offset: float
) -> tuple[dict[str, Tensor], list[LayerReport]]:
    """The block's tensors as the file holds them."""
    tensors: dict[str, Tensor] = {}
    reports = []
    for name, matrix in block.matrices.items():
        if matrix.scheme.element == "float":
            matrix = replace(matrix, codes=narrow(name, matrix.codes, dtype))
        encoded = file_format.encode(matrix)
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in encoded.items()}
        size = sum(tensor.numel() * tensor.element_size() for tensor in encoded.values())
        reports.append(
            LayerReport(name, describe_scheme(matrix.scheme), matrix.codes.numel(), size, block.errors[name])
        )
    for name, value in block.floats.items():
        if name in block.kept:
            tensors[f"{name}.weight"] = value
        elif name in block.of_states:
            tensors[name] = value if name.endswith(_STATE_PARAMETERS) else narrow(name, value, dtype)
        elif name.endswith(_WHOLE_NAMES):
            tensors[name] = value
        elif name in block.linears:
            tensors[f"{name}.weight"] = narrow(name, value, dtype)
        elif name.endswith(".bias"):
            tensors[name] = narrow(name, value, dtype)
        else:
            tensors[f"{name}.weight"] = narrow(name, stored_norm(value, norm_offset), dtype)
    return tensors, reports


def describe_scheme(scheme: Scheme) -> str:
    from tokenmill.model.formats.coded import type_name

    return type_name(scheme)


def to_plain(reports: list[LayerReport]) -> dict[str, Any]:
    return {"layers": [asdict(report) for report in reports]}


def from_plain(plain: Mapping[str, Any]) -> list[LayerReport]:
    return [LayerReport(**layer) for layer in plain["layers"]]


def weight_errors(layers: list[LayerReport]) -> dict[str, Any]:
    worst = max(layers, key=lambda layer: layer.relative_error)
    mean = sum(layer.relative_error for layer in layers) / len(layers)
    return {
        "weight_error_mean": mean,
        "weight_error_worst": worst.relative_error,
        "weight_error_worst_layer": worst.name,
    }
