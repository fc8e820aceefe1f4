"""Plain floats: what pruning alone makes, zeros written out. Every engine that reads safetensors loads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from tokenmill.model.formats.files.base import FileFormat, Shape
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme


class DenseFile(FileFormat):
    name = "dense"

    @classmethod
    def refuses(cls, scheme: Scheme, shape: Shape) -> str | None:  # noqa: ARG003 - any shape can be stored
        if scheme.element != "float":
            return f"it stores floats, not {scheme.element}; write it as compressed-tensors"
        return None

    @classmethod
    def encode(cls, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        return {"weight": matrix.codes.contiguous()}

    @classmethod
    def quantization_config(cls, schemes: Mapping[str, Scheme], ignored: Sequence[str]) -> dict[str, object]:  # noqa: ARG003
        """Nothing: the model is not a quantized one."""
        return {}
