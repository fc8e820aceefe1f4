"""4-bit floats (e2m1), two to a byte with the even column low: NVFP4 (groups of 16, a float8 scale each, one float32
scale for the matrix) and MXFP4 (groups of 32, a power of two each).

Read from compressed-tensors (weight_packed; weight_global_scale divides) and ModelOpt (weight; weight_scale_2
multiplies). The type of the scales tells the two kinds apart.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.errors import CheckpointError
from tokenmill.model.formats.base import WeightFormat
from tokenmill.model.formats.bits import pack_nibbles, unpack_nibbles
from tokenmill.model.formats.coded import CodedWeight, check_dimensions, scalar
from tokenmill.model.formats.float8 import exponents, multipliers
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.model.formats.settings import input_rounding

_SCALE_TYPES = {"F8_E4M3": "e4m3", "U8": "e8m0", "F8_E8M0": "e8m0"}


class Float4Weight(CodedWeight):
    format_name = "float4"

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, activations: str = "none") -> None:
        check_dimensions(prefix, tensors, weight_packed=2, weight=2, weight_scale=2)
        self.packed = tensors["weight_packed"] if "weight_packed" in tensors else tensors["weight"]
        self.scales = tensors["weight_scale"]
        rows, columns = self.packed.shape[0], self.packed.shape[1] * 2
        scale_type = "e4m3" if self.scales.dtype == torch.float8_e4m3fn else "e8m0"
        group_size = 16 if scale_type == "e4m3" else 32
        if self.scales.shape != (rows, columns // group_size):
            raise CheckpointError(
                f"{prefix}: scales of shape {list(self.scales.shape)} do not fit {columns} columns in groups of "
                f"{group_size}",
                "download it again",
            )
        divisor, factor = (scalar(prefix, tensors, name) for name in ("weight_global_scale", "weight_scale_2"))
        self.global_scale = 1.0 / divisor if divisor else factor if factor is not None else 1.0
        scheme = Scheme("e2m1", 4, group_size, scale_type=scale_type, activations=activations)
        self.describe(scheme, (rows, columns), self.scales.dtype)
        if activations == "nvfp4":
            self.input_scale = _input_scale(tensors, prefix)

    def parts(self) -> dict[str, Tensor]:
        return {"packed": self.packed, "scales": self.scales}

    def decode(self, begin: int = 0, end: int | None = None) -> QuantizedMatrix:
        return QuantizedMatrix(
            self.scheme,
            unpack_nibbles(self.packed[begin:end]),
            multipliers(self.scales[begin:end]),
            global_scale=self.global_scale,
            input_scale=self.input_scale,
        )


class Float4Format(WeightFormat):
    name = "float4"

    @classmethod
    def tensor_names(cls, checkpoint: Checkpoint, prefix: str) -> list[str]:
        for weight, optional in (
            ("weight_packed", ("weight_global_scale", "input_global_scale")),
            ("weight", ("weight_scale_2", "input_scale")),
        ):
            needed = [f"{prefix}.{weight}", f"{prefix}.weight_scale"]
            if any(name not in checkpoint for name in needed):
                continue
            types = [checkpoint.tensor(name).type_name for name in needed]
            if types[0] == "U8" and types[1] in _SCALE_TYPES:
                return needed + [name for suffix in optional if (name := f"{prefix}.{suffix}") in checkpoint]
        return []

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str) -> Float4Weight:
        names = cls.tensor_names(checkpoint, prefix)
        tensors = {name.removeprefix(f"{prefix}."): checkpoint.tensor(name).data for name in names}
        return Float4Weight(tensors, prefix, input_rounding(checkpoint, prefix))

    @classmethod
    def encode(cls, matrix: QuantizedMatrix, scale_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """As compressed-tensors names them. The type of the scales follows from the scheme."""
        tensors = {"weight_packed": pack_nibbles(matrix.codes)}
        if matrix.scheme.scale_type == "e8m0":
            scales = exponents(matrix.scales)
            return {**tensors, "weight_scale": scales.view(scale_dtype) if scale_dtype is not None else scales}
        scales = matrix.scales.to(torch.float8_e4m3fn)
        assert torch.equal(scales.float(), matrix.scales), "scales must be float8 numbers"
        tensors |= {"weight_scale": scales, "weight_global_scale": torch.tensor([1.0 / matrix.global_scale])}
        if matrix.input_scale is not None:
            tensors["input_global_scale"] = torch.tensor([1.0 / matrix.input_scale])
        return tensors


def _input_scale(tensors: Mapping[str, Tensor], prefix: str) -> float:
    """The calibrated scale of the input as a multiplier."""
    divisor, factor = (scalar(prefix, tensors, name) for name in ("input_global_scale", "input_scale"))
    if divisor or factor:
        return 1.0 / divisor if divisor else factor or 0.0
    raise CheckpointError(f"{prefix} has NVFP4 activations and no input scale", "download it again")
