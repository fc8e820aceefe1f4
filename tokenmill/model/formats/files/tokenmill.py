"""Our own files: codebook weights (TurboQuant), which no peer's format holds and no peer loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from tokenmill.model.formats.codebook import BITS, CodebookFormat
from tokenmill.model.formats.files.base import FileFormat, Shape
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme


class TokenmillFile(FileFormat):
    name = "tokenmill"

    @classmethod
    def refuses(cls, scheme: Scheme, shape: Shape) -> str | None:  # noqa: ARG003 - any shape can be stored
        if scheme.element != "codebook":
            return f"it stores codebooks, not {scheme.element}; write it as compressed-tensors"
        if scheme.bits not in BITS or scheme.group_size or scheme.block_rows != 1 or scheme.activations != "none":
            return "its codebooks have one scale per row and float inputs; use the method turboquant"
        return None

    @classmethod
    def encode(cls, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        return CodebookFormat.encode(matrix)

    @classmethod
    def quantization_config(cls, schemes: Mapping[str, Scheme], ignored: Sequence[str]) -> dict[str, object]:
        return {
            "quant_method": "tokenmill",
            "format": "codebook",
            "bits": sorted({scheme.bits for scheme in schemes.values()}),
            "ignore": list(ignored),
        }
