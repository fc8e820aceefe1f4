"""compressed-tensors "int-quantized" (and "naive-quantized" ints): one signed byte per weight, unpacked.

weight int8 [out, in], weight_scale [out, 1] (or [1], or [out, groups]); a calibrated input_scale where activations are
static.
The usual W8A8 file, with the input of every product rounded to int8 as well.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.errors import CheckpointError
from tokenmill.model.formats.base import WeightFormat
from tokenmill.model.formats.coded import CodedWeight, check_dimensions, group_size_of, scalar, stored_scales
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.model.formats.settings import input_rounding, weight_settings


class PlainIntWeight(CodedWeight):
    format_name = "int-quantized"

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, bits: int = 8, activations: str = "none") -> None:
        check_dimensions(prefix, tensors, weight=2)
        self.values = tensors["weight"]
        self.scales = tensors["weight_scale"]
        rows, columns = self.values.shape
        if self.scales.numel() != 1 and (self.scales.numel() % rows or self.scales.shape[0] != rows):
            raise CheckpointError(f"{prefix}: weight and weight_scale do not fit together", "download it again")
        scales = self.scales.reshape(1, 1) if self.scales.numel() == 1 else self.scales.reshape(rows, -1)
        self.scale_rows = scales
        group_size = group_size_of(columns, scales.shape[1], None, prefix)
        block_rows = 1 if scales.shape[0] == rows else 0
        scheme = Scheme("int", bits, group_size, block_rows, activations=activations)
        self.describe(scheme, (rows, columns), scales.dtype)
        self.input_scale = scalar(prefix, tensors, "input_scale")
        if activations == "int8_static" and self.input_scale is None:
            raise CheckpointError(f"{prefix} has static activations and no input_scale", "download it again")

    def parts(self) -> dict[str, Tensor]:
        return {"values": self.values, "scales": self.scales}

    def decode(self, begin: int = 0, end: int | None = None) -> QuantizedMatrix:
        codes = (self.values[begin:end].short() + 2 ** (self.scheme.bits - 1)).to(torch.uint8)
        scales = self.scale_rows[begin:end] if self.scheme.block_rows else self.scale_rows
        return QuantizedMatrix(self.scheme, codes, scales.float(), input_scale=self.input_scale)


class PlainIntFormat(WeightFormat):
    name = "int-quantized"

    @classmethod
    def tensor_names(cls, checkpoint: Checkpoint, prefix: str) -> list[str]:
        needed = [f"{prefix}.weight", f"{prefix}.weight_scale"]
        if any(name not in checkpoint for name in needed) or checkpoint.tensor(needed[0]).type_name != "I8":
            return []
        static = f"{prefix}.input_scale"
        return [*needed, static] if static in checkpoint else needed

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str) -> PlainIntWeight:
        names = cls.tensor_names(checkpoint, prefix)
        tensors = {name.removeprefix(f"{prefix}."): checkpoint.tensor(name).data for name in names}
        settings = weight_settings(checkpoint, prefix)
        if not settings.get("symmetric", True):
            raise CheckpointError(
                f"{prefix}: asymmetric int-quantized weights are not what tokenmill runs",
                "requantize them symmetrically, or as pack-quantized",
            )
        bits = settings.get("num_bits", 8)
        return PlainIntWeight(tensors, prefix, int(bits), input_rounding(checkpoint, prefix))

    @classmethod
    def encode(cls, matrix: QuantizedMatrix, scale_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        assert matrix.zeros is None
        scales = stored_scales(matrix.scales, scale_dtype)
        tensors = {
            "weight": (matrix.codes.short() - 2 ** (matrix.scheme.bits - 1)).to(torch.int8),
            "weight_scale": scales if matrix.scheme.block_rows else scales.reshape(1),
        }
        if matrix.input_scale is not None:
            tensors["input_scale"] = torch.tensor([matrix.input_scale])
        return tensors
