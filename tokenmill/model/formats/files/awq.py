"""AWQ "gemm" files: 4-bit ints, one scheme for the whole model. Symmetric weights are written with zero points of 8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from tokenmill.model.formats.awq import AwqFormat
from tokenmill.model.formats.files.base import FileFormat, Shape, refuses_integers
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme


class AwqFile(FileFormat):
    name = "awq"
    one_scheme = "its config states one group size"

    @classmethod
    def refuses(cls, scheme: Scheme, shape: Shape) -> str | None:
        reason = refuses_integers(scheme, shape, (4,))
        if reason is None and shape[0] % 8:
            return f"{shape[0]} outputs are not a multiple of 8; write it as compressed-tensors"
        return reason

    @classmethod
    def encode(cls, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        return AwqFormat.encode(matrix)

    @classmethod
    def quantization_config(cls, schemes: Mapping[str, Scheme], ignored: Sequence[str]) -> dict[str, object]:
        scheme = next(iter(schemes.values()))
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": scheme.group_size or -1,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(ignored) or None,
        }
