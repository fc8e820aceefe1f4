"""compressed-tensors "pack-quantized": integers of 2 to 8 bits in 32-bit words, a scale per row or group of columns.

weight_packed int32 [out, words] holds each row as a bit stream (older files: floor(32 / bits) codes per word; told
apart by the number of words), weight_scale [out, groups], weight_shape int64 [2], and for asymmetric weights
weight_zero_point int32, packed down the rows. Codes and zero points are stored as code + 2^(bits-1), i.e. unsigned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.errors import CheckpointError
from tokenmill.model.formats.base import WeightFormat
from tokenmill.model.formats.bits import pack_bits, unpack_bits, unpack_padded, words_for
from tokenmill.model.formats.coded import (
    CodedWeight,
    check_dimensions,
    group_size_of,
    integer_zeros,
    scalar,
    stored_scales,
    stored_shape,
)
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.model.formats.settings import input_rounding, weight_settings

_OPTIONAL = ("weight_zero_point", "weight_g_idx", "input_scale")


class PackedIntWeight(CodedWeight):
    format_name = "pack-quantized"

    def __init__(
        self, tensors: Mapping[str, Tensor], prefix: str, settings: Mapping[str, Any], activations: str = "none"
    ) -> None:
        """`tensors` by suffix, as in the file; `settings`: the `weights` section of the config, may be empty."""
        check_dimensions(prefix, tensors, weight_packed=2, weight_scale=2, weight_shape=1, weight_zero_point=2)
        self.packed = tensors["weight_packed"]
        self.scales = tensors["weight_scale"]
        self.zero_words = tensors.get("weight_zero_point")
        rows, columns = stored_shape(prefix, tensors["weight_shape"])
        bits = _bits(columns, self.packed.shape[1], settings.get("num_bits"), prefix)
        zero_groups = self.scales.shape[1] if self.zero_words is None else self.zero_words.shape[1]
        if {self.packed.shape[0], self.scales.shape[0]} != {rows} or zero_groups != self.scales.shape[1]:
            raise CheckpointError(
                f"{prefix}: weight_packed, weight_scale and weight_shape disagree", "download it again"
            )
        self.padded = self.packed.shape[1] != words_for(columns, bits)
        group_size = group_size_of(columns, self.scales.shape[1], settings.get("group_size"), prefix)
        _refuse_true_order(tensors.get("weight_g_idx"), group_size, prefix)
        scheme = Scheme("int", bits, group_size, symmetric=self.zero_words is None, activations=activations)
        self.describe(scheme, (rows, columns), self.scales.dtype)
        self.zeros = None if self.zero_words is None else _unpack_zeros(self.zero_words, bits, rows)
        self.input_scale = scalar(prefix, tensors, "input_scale")

    def parts(self) -> dict[str, Tensor]:
        parts = {"packed": self.packed, "scales": self.scales}
        return parts if self.zero_words is None else {**parts, "zeros": self.zero_words}

    def decode(self, begin: int = 0, end: int | None = None) -> QuantizedMatrix:
        unpack = unpack_padded if self.padded else unpack_bits
        codes = unpack(self.packed[begin:end], self.scheme.bits, self.in_features)
        zeros = None if self.zeros is None else self.zeros[begin:end].float()
        return QuantizedMatrix(self.scheme, codes, self.scales[begin:end].float(), zeros, input_scale=self.input_scale)


class PackedIntFormat(WeightFormat):
    name = "pack-quantized"

    @classmethod
    def tensor_names(cls, checkpoint: Checkpoint, prefix: str) -> list[str]:
        needed = [f"{prefix}.{suffix}" for suffix in ("weight_packed", "weight_scale", "weight_shape")]
        if any(name not in checkpoint for name in needed) or checkpoint.tensor(needed[0]).type_name != "I32":
            return []
        return needed + [name for suffix in _OPTIONAL if (name := f"{prefix}.{suffix}") in checkpoint]

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str) -> PackedIntWeight:
        names = cls.tensor_names(checkpoint, prefix)
        tensors = {name.removeprefix(f"{prefix}."): checkpoint.tensor(name).data for name in names}
        settings = weight_settings(checkpoint, prefix)
        return PackedIntWeight(tensors, prefix, settings, input_rounding(checkpoint, prefix))

    @classmethod
    def encode(cls, matrix: QuantizedMatrix, scale_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The tensors of a file by suffix. The matrix must be of ints; see `refuses` in files.py."""
        tensors = {
            "weight_packed": pack_bits(matrix.codes, matrix.scheme.bits),
            "weight_scale": stored_scales(matrix.scales, scale_dtype),
            "weight_shape": torch.tensor(matrix.shape),
        }
        if not matrix.scheme.symmetric:
            tensors["weight_zero_point"] = pack_bits(integer_zeros(matrix).T, matrix.scheme.bits).T.contiguous()
        if matrix.input_scale is not None:
            tensors["input_scale"] = torch.tensor([matrix.input_scale])
        return tensors


def _bits(columns: int, words: int, declared: object, prefix: str) -> int:
    """As declared, if the number of words fits either layout; else the width that a dense row of these words has."""
    if isinstance(declared, int) and 1 <= declared <= 8:
        candidates = [declared]
    else:
        candidates = [bits for bits in range(1, 9) if words_for(columns, bits) == words]
    if len(candidates) == 1:
        bits = candidates[0]
        if words in (words_for(columns, bits), -(-columns // (32 // bits))):
            return bits
    raise CheckpointError(
        f"{prefix}: {words} words a row do not hold {columns} codes of {declared or 'one'} bits",
        "state num_bits in quantization_config, or download the file again",
    )


def _unpack_zeros(words: Tensor, bits: int, rows: int) -> Tensor:
    """int32 [words, groups], packed down the rows -> uint8 [rows, groups]."""
    unpack = unpack_bits if words.shape[0] == words_for(rows, bits) else unpack_padded
    return unpack(words.T, bits, rows).T


def _refuse_true_order(order: Tensor | None, group_size: int, prefix: str) -> None:
    """Old files may hold an activation order; -1 in it, or the natural one, means there is none."""
    if order is None or not group_size or bool((order == -1).any()):
        return
    if not torch.equal(order.long(), torch.arange(order.numel()) // group_size):
        raise CheckpointError(
            f"{prefix} has groups in activation order (actorder: group), which compressed-tensors has withdrawn",
            "requantize with actorder: weight",
        )
