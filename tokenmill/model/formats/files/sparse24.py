"""compressed-tensors' "sparse-24-bitmask": of four neighbours the two that are not zero, and a bit for each weight.

9/16 of the bytes of plain 16-bit floats. vLLM has removed its reader (0.19); whether an earlier one runs such a file
without quantization has not been tried. `dense` is the same model for everyone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from tokenmill.model.formats.files.base import FileFormat, Shape
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.model.formats.sparse24 import Sparse24Format


class Sparse24File(FileFormat):
    name = "sparse-24"

    @classmethod
    def refuses(cls, scheme: Scheme, shape: Shape) -> str | None:
        if scheme.element != "float" or scheme.sparsity != "2:4":
            return "it stores floats of which two in four are zero; use sparsegpt, wanda or magnitude with pattern=2:4"
        return f"{shape[1]} columns are no multiple of 4; write it as dense" if shape[1] % 4 else None

    @classmethod
    def encode(cls, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        return Sparse24Format.encode(matrix.codes)

    @classmethod
    def quantization_config(cls, schemes: Mapping[str, Scheme], ignored: Sequence[str]) -> dict[str, object]:  # noqa: ARG003
        return {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "config_groups": {},
            "ignore": list(ignored),
            "sparsity_config": {
                "format": "sparse-24-bitmask",
                "sparsity_structure": "2:4",
                "global_sparsity": 0.5,
                "targets": ["Linear"],
                "ignore": list(ignored),
            },
        }
