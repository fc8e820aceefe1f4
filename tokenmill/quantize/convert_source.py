"""A checkpoint for `convert`: every matrix as codes where its format has them, or as floats, in Hugging Face's layout.

Reads through the engine's own weight formats, some rows at a time. Knows nothing of what is written. Used by convert.py
and, on the finished output, to verify that both files hold the same values.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.gguf_recurrent import has_offset
from tokenmill.checkpoint.hf_export import ROPE_DIVISORS, exported_description, hf_tensor_name, to_hf_layout
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import UserError
from tokenmill.model.architectures import architecture_of
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.coded import CodedWeight
from tokenmill.model.formats.ggml import GgmlWeight
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.model.reader import WeightReader
from tokenmill.quantize.ggml.codes import decode_blocks, scheme_of

_NO_POSITIONS = 1  # rotary tables are not needed to read weights
_TILE_VALUES = 1 << 22


class _ArrayReader(WeightReader):
    """Records small arrays, and vectors that a file keeps with more than one axis, as Hugging Face files have them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.arrays: dict[str, Tensor] = {}

    def vector(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        if name in self.checkpoint and len(self.checkpoint.tensor(name).shape) > 1:
            self.arrays[name] = self.checkpoint.tensor(name).data.float().flatten()
        return super().vector(name, size, offset)

    def array(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.arrays[name] = super().array(name, shape)
        return self.arrays[name]


class ConvertSource:
    changed = False  # whether values differ from the file's, so that codes cannot be moved

    def __init__(self, path: Path) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(path)
        architecture = architecture_of(self.checkpoint.description)
        if "experts" in self.checkpoint.description.features():
            raise UserError(
                f"'{self.checkpoint.description.model_type}' has experts, which `convert` cannot move yet",
                "use `tokenmill quantize`, for a GGUF with --format gguf",
            )
        self.description = exported_description(self.checkpoint)
        reader = _ArrayReader(self.checkpoint)
        architecture(reader, self.checkpoint.description, _NO_POSITIONS)
        reader.finish()
        self._weights = reader.weights
        self._arrays = reader.arrays
        self._parts = reader.tensor_names
        parts = {part for names in reader.tensor_names.values() for part in names}
        self.matrices: list[str] = list(reader.weights)  # prefixes
        # Also small arrays, as convolutions and decays; by the names that Hugging Face files have.
        self._stored_names: dict[str, str] = {
            hf_tensor_name(name): name
            for name in self.checkpoint.names()
            if name not in parts
            and name != ROPE_DIVISORS
            and (name in reader.arrays or len(self.checkpoint.tensor(name).shape) == 1)
        }
        self.vectors: list[str] = list(self._stored_names)

    def weight(self, prefix: str) -> LinearWeight:
        return self._weights[prefix]

    def shape(self, prefix: str) -> tuple[int, int]:
        weight = self._weights[prefix]
        return weight.out_features, weight.in_features

    def stored_dtype(self, name: str) -> torch.dtype:
        """Of a plain vector, or of a plain matrix (by prefix); float32 for what is expanded from codes."""
        if name in self._weights:
            weight = self._weights[name]
            return weight.parts()["values"].dtype if weight.format_name == "dense" else torch.float32
        dtype = self.checkpoint.tensor(self._stored_names[name]).data.dtype
        return dtype if dtype.is_floating_point else torch.float32

    def scheme(self, prefix: str) -> Scheme | None:
        """Of a matrix that is codes under scales; None where it is floats, or blocks that no scheme describes."""
        weight = self._weights[prefix]
        if isinstance(weight, GgmlWeight):
            return scheme_of(weight.type_name)
        if not isinstance(weight, CodedWeight):
            return None
        weight.decode(0, max(1, weight.scheme.block_rows))  # raises for formats that have no codes
        return weight.scheme

    def is_plain(self, prefix: str) -> bool:
        return self._weights[prefix].format_name == "dense"

    def codes(self, prefix: str) -> QuantizedMatrix:
        """The whole matrix, of which `scheme` is not None."""
        weight = self._weights[prefix]
        if isinstance(weight, GgmlWeight):
            matrix = decode_blocks(weight.type_name, weight.blocks)
        else:
            assert isinstance(weight, CodedWeight)
            matrix = weight.decode()
        if not self.checkpoint.description.rope_interleaved:
            return matrix
        assert matrix.scheme.block_rows == 1
        name, d = f"{prefix}.weight", self.checkpoint.description
        zeros = None if matrix.zeros is None else to_hf_layout(name, matrix.zeros, d)
        codes, scales = to_hf_layout(name, matrix.codes, d), to_hf_layout(name, matrix.scales, d)
        return replace(matrix, codes=codes, scales=scales, zeros=zeros)

    def floats(self, prefix: str, begin: int, end: int) -> Tensor:
        """Rows [begin, end) as float32; whole heads where rows are reordered."""
        rows = self._weights[prefix].dequantize(begin, end)
        return to_hf_layout(f"{prefix}.weight", rows, self.checkpoint.description)

    def tiles(self, prefix: str) -> list[tuple[int, int]]:
        """Ranges of rows that bound the memory of `floats`; multiples of a head."""
        rows, columns = self.shape(prefix)
        head = self.description.head_dim or 1
        step = max(1, _TILE_VALUES // (columns * head)) * head
        return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]

    def vector(self, name: str) -> Tensor:
        """float32."""
        stored = self._stored_names[name]
        return to_hf_layout(stored, self._value(stored), self.checkpoint.description)

    def _value(self, stored: str) -> Tensor:
        array = self._arrays.get(stored)
        return self.checkpoint.tensor(stored).data.float() if array is None else array

    def as_used(self, name: str) -> Tensor:
        """A vector as the model computes with it: norms with what the file leaves out."""
        if has_offset(name):
            return self._value(self._stored_names[name]) + self.checkpoint.description.norm_offset
        return self.vector(name)

    def release(self, prefix: str) -> None:
        for part in self._parts[prefix]:
            self.checkpoint.release(part)
