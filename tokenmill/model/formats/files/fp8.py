"""`quant_method: fp8`, the style of DeepSeek: float8 weights in blocks (weight_scale_inv) or with one scale per matrix.

The config implies how activations are rounded: in blocks per token and 128 columns, otherwise per token or by a
calibrated scale. For scales per row use compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tokenmill.model.formats.files.base import FileFormat, Shape
from tokenmill.model.formats.float8 import Float8Format
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme


class Float8File(FileFormat):
    name = "fp8"
    one_scheme = "its config states one for the model"

    @classmethod
    def refuses(cls, scheme: Scheme, shape: Shape) -> str | None:  # noqa: ARG003 - any shape can be stored
        if scheme.element != "e4m3" or scheme.scale_type != "float":
            return f"it stores float8 with float scales, not {scheme.element}; write it as compressed-tensors"
        if scheme.block_rows > 1 and scheme.group_size:
            good: tuple[str, ...] = ("fp8_group128",)
        elif not scheme.block_rows and not scheme.group_size:
            good = ("fp8_token", "fp8_static")
        else:
            return "it has a scale per block or per matrix, not per row; write it as compressed-tensors"
        if scheme.activations not in good:
            return f"its activations are {' or '.join(good)}, not {scheme.activations}; write it as compressed-tensors"
        return None

    @classmethod
    def encode(cls, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        name = "weight_scale_inv" if matrix.scheme.block_rows > 1 else "weight_scale"
        return Float8Format.encode(matrix, torch.float32, name)

    @classmethod
    def quantization_config(cls, schemes: Mapping[str, Scheme], ignored: Sequence[str]) -> dict[str, object]:
        scheme = next(iter(schemes.values()))
        config: dict[str, object] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "static" if scheme.activations == "fp8_static" else "dynamic",
            "modules_to_not_convert": list(ignored) or None,
        }
        if scheme.block_rows > 1:
            config["weight_block_size"] = [scheme.block_rows, scheme.group_size]
        return config
