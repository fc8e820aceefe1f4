"""float8 (e4m3) weights: one byte each, with a scale per tensor, per row, per block (128 x 128), or a power of two per
32 columns (MXFP8).

Read from compressed-tensors (weight_scale), DeepSeek style files (weight_scale_inv, which despite its name multiplies)
and ModelOpt; which of the scalings it is follows from the shape and type of the scales. input_scale is the calibrated
scale of static activations.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.errors import CheckpointError
from tokenmill.model.formats.base import WeightFormat
from tokenmill.model.formats.coded import CodedWeight, check_dimensions, scalar, stored_scales
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.model.formats.settings import input_rounding, weight_settings

_USUAL_BLOCK = (128, 128)
MX_GROUP = 32


class Float8Weight(CodedWeight):
    format_name = "float8"

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        prefix: str,
        block: tuple[int, int] | None = None,
        activations: str = "none",
    ) -> None:
        check_dimensions(prefix, tensors, weight=2)
        self.values = tensors["weight"]
        self.scales = tensors["weight_scale"] if "weight_scale" in tensors else tensors["weight_scale_inv"]
        rows, columns = self.values.shape
        self.scale_rows, block_rows, group_size = _scaling(self.scales, rows, columns, block, prefix)
        scale_type = "e8m0" if self.scales.dtype in (torch.uint8, torch.float8_e8m0fnu) else "float"
        scheme = Scheme("e4m3", 8, group_size, block_rows, scale_type=scale_type, activations=activations)
        self.describe(scheme, (rows, columns), self.scales.dtype)
        self.input_scale = scalar(prefix, tensors, "input_scale")
        if activations == "fp8_static" and self.input_scale is None:
            raise CheckpointError(f"{prefix} has static activations and no input_scale", "download it again")

    def parts(self) -> dict[str, Tensor]:
        return {"values": self.values, "scales": self.scales}

    def decode(self, begin: int = 0, end: int | None = None) -> QuantizedMatrix:
        codes = self.values[begin:end].view(torch.uint8)
        block_rows, last = self.scheme.block_rows, self.out_features if end is None else end
        scales = self.scale_rows[begin // block_rows : -(-last // block_rows)] if block_rows else self.scale_rows
        return QuantizedMatrix(self.scheme, codes, multipliers(scales), input_scale=self.input_scale)


class Float8Format(WeightFormat):
    name = "float8"

    @classmethod
    def tensor_names(cls, checkpoint: Checkpoint, prefix: str) -> list[str]:
        weight = f"{prefix}.weight"
        if weight not in checkpoint or checkpoint.tensor(weight).type_name != "F8_E4M3":
            return []
        scales = [
            name for suffix in ("weight_scale", "weight_scale_inv") if (name := f"{prefix}.{suffix}") in checkpoint
        ]
        static = f"{prefix}.input_scale"
        return [weight, *scales[:1], *([static] if static in checkpoint else [])] if scales else []

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str) -> Float8Weight:
        names = cls.tensor_names(checkpoint, prefix)
        tensors = {name.removeprefix(f"{prefix}."): checkpoint.tensor(name).data for name in names}
        declared = weight_settings(checkpoint, prefix).get("block_structure")
        declared = declared or checkpoint.quantization().get("weight_block_size")
        if isinstance(declared, str):  # an old spelling: "128x128"
            declared = declared.split("x")
        block = (int(declared[0]), int(declared[1])) if isinstance(declared, list) and len(declared) == 2 else None
        return Float8Weight(tensors, prefix, block, input_rounding(checkpoint, prefix))

    @classmethod
    def encode(
        cls, matrix: QuantizedMatrix, scale_dtype: torch.dtype | None = None, scale_name: str = "weight_scale"
    ) -> dict[str, Tensor]:
        """`scale_name`: "weight_scale_inv" for DeepSeek style blocks, whose scales are float32."""
        scheme = matrix.scheme
        if scheme.scale_type == "e8m0":
            scales = exponents(matrix.scales)
            scales = scales.view(scale_dtype) if scale_dtype is not None else scales
        else:
            scales = stored_scales(matrix.scales, scale_dtype)
        if not scheme.block_rows and not scheme.group_size:
            scales = scales.reshape(1)
        tensors = {"weight": matrix.codes.contiguous().view(torch.float8_e4m3fn), scale_name: scales}
        if matrix.input_scale is not None:
            tensors["input_scale"] = torch.tensor([matrix.input_scale])
        return tensors


def multipliers(scales: Tensor) -> Tensor:
    """Stored scales as float32; a byte is the exponent of a power of two, biased by 127."""
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.float()


def exponents(scales: Tensor) -> Tensor:
    """float32 powers of two as biased exponents (uint8): the inverse of `multipliers`."""
    bits = scales.float().contiguous().view(torch.int32)
    assert bool(((bits & ((1 << 23) - 1)) == 0).all()), "scales must be powers of two"
    return (bits >> 23).to(torch.uint8)


def _scaling(
    scales: Tensor, rows: int, columns: int, block: tuple[int, int] | None, prefix: str
) -> tuple[Tensor, int, int]:
    """(scales [blocks down, blocks across], rows per block, columns per block); 0 means all."""
    if scales.numel() == 1 and not block:
        return scales.reshape(1, 1), 0, 0
    if scales.dim() and scales.numel() == rows and scales.shape[0] == rows and not block:
        return scales.reshape(rows, 1), 1, 0
    if scales.dim() == 2 and scales.shape == (rows, -(-columns // MX_GROUP)) and not block:
        return scales, 1, MX_GROUP
    size = block or _USUAL_BLOCK
    if scales.dim() == 2 and scales.shape == (-(-rows // size[0]), -(-columns // size[1])):
        return scales, size[0], size[1]
    raise CheckpointError(
        f"{prefix}: scales of shape {list(scales.shape)} do not fit a float8 matrix [{rows}, {columns}]",
        "state weight_block_size (or block_structure) in quantization_config",
    )
