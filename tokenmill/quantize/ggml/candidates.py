"""The ggml types that each matrix of a file could have: bytes, errors, and the weights as a type would round them.

Errors are squared and weighted by importance, on a sample of rows: they only compare the types of one matrix, what a
matrix is worth is measured elsewhere. Rows are in Hugging Face's order, which types do not see. Used by mixed_gguf.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.kernels.ggml_types import TYPES
from tokenmill.quantize.ggml.blocks import BLOCK_TYPES, dequantize, quantize
from tokenmill.quantize.ggml.export import GGUFPlan, importance_prefixes
from tokenmill.quantize.ggml.mixes import is_quantized
from tokenmill.quantize.source import EMBEDDING, SourceModel

_SAMPLED_ROWS = 192


@dataclass(frozen=True, slots=True)
class Matrix:
    """One tensor of the file. `prefixes`: the linears it is made of (several where experts are stacked)."""

    slot: str
    prefixes: tuple[str, ...]
    shape: tuple[int, ...]
    default: str  # what llama.cpp's mix gives it
    stored: str  # the type in which the source holds it, "" unless bytes can be copied
    types: tuple[str, ...]  # that its rows can have

    @property
    def kind(self) -> str:
        """The same part of every layer: "self_attn.q_proj"."""
        name = self.prefixes[0]
        return name.split(".", 3)[3] if name.startswith("model.layers.") else name

    def nbytes(self, type_name: str) -> int:
        return math.prod(self.shape[:-1]) * TYPES[type_name].row_bytes(self.shape[-1])


def find_matrices(plan: GGUFPlan, source: SourceModel, allowed: Sequence[str] = BLOCK_TYPES) -> list[Matrix]:
    """The matrices whose type is free: all that a mix would quantize, but for parts of others and rows that no
    `allowed` type divides."""
    matrices = []
    known = {EMBEDDING, *source.edge_names(), *source.layer_linears()}
    for tensor, slot in zip(plan.source.tensors, plan.slots, strict=True):
        if not is_quantized(slot.name, slot.shape) or tensor.rows or not tensor.source:
            continue
        prefixes = tuple(name.removesuffix(".weight") for name in plan.source.sources(tensor))
        if not known.issuperset(prefixes) or (slot.name == "output.weight" and prefixes[0] == EMBEDDING):
            continue
        fitting = tuple(name for name in allowed if slot.shape[-1] % TYPES[name].block_size == 0)
        stored = next((name for name in fitting if plan.source.is_same(tensor, name)), "")
        if fitting:
            matrices.append(Matrix(slot.name, prefixes, slot.shape, slot.type_name, stored, fitting))
    return matrices


class RoundedWeights(Mapping[str, Tensor]):
    """The weights of a choice of types, by linear, rounded when asked for; bytes are kept for the next choice."""

    def __init__(self, rounder: Rounder, types: Mapping[str, str]) -> None:
        self._rounder = rounder
        self._types = {
            prefix: types[matrix.slot]
            for matrix in rounder.matrices
            if matrix.slot in types and types[matrix.slot] != matrix.stored
            for prefix in matrix.prefixes
        }

    def __getitem__(self, prefix: str) -> Tensor:
        return self._rounder.rounded(prefix, self._types[prefix])

    def __iter__(self) -> Iterator[str]:
        return iter(self._types)

    def __len__(self) -> int:
        return len(self._types)


class Rounder:
    """Rounds the matrices of one model to ggml types."""

    def __init__(self, source: SourceModel, matrices: list[Matrix], importance: Mapping[str, Tensor]) -> None:
        self.source, self.matrices = source, matrices
        self._importance = importance
        self._packed: dict[tuple[str, str], Tensor] = {}

    def rounded(self, prefix: str, type_name: str) -> Tensor:
        if (prefix, type_name) not in self._packed:
            self._packed[prefix, type_name] = self.pack(prefix, type_name, self.source.read_edge(prefix))
        return dequantize(type_name, self._packed[prefix, type_name])

    def errors(self, matrix: Matrix) -> dict[str, float]:
        """By type: the weighted squared error of the matrix, from a sample of its rows."""
        errors = dict.fromkeys(matrix.types, 0.0)
        for prefix in matrix.prefixes:
            weight = self.source.read_edge(prefix)
            rows = weight[torch.arange(0, weight.shape[0], max(1, weight.shape[0] // _SAMPLED_ROWS))]
            importance = self._of(prefix)
            weights = torch.ones(rows.shape[1]) if importance is None else importance
            for type_name in matrix.types:
                if type_name != matrix.stored:
                    change = dequantize(type_name, quantize(type_name, rows, importance)) - rows
                    total = float((change.square() * weights).sum(dtype=torch.float64))
                    errors[type_name] += total * weight.shape[0] / rows.shape[0]
        return errors

    def pack(self, prefix: str, type_name: str, weight: Tensor) -> Tensor:
        return quantize(type_name, weight, self._of(prefix))

    def forget(self) -> None:
        self._packed.clear()

    def _of(self, prefix: str) -> Tensor | None:
        return self._importance.get(importance_prefixes([prefix], self._importance)[0])
