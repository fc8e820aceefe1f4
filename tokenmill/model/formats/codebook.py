"""Our own format for codebook weights in a rotated basis (TurboQuant): no peer has one that holds them.

weight_codes int32 [out, words] holds each row of table indices as a bit stream, weight_norms [out, 1] one scale per
row, weight_table float32 [2^bits], weight_shape int64 [2], and weight_rotation int64 [1] the seed of the signed
Hadamard transform that the rows were rotated by (absent: not rotated). Products rotate the input: kernels/ref_codebook.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.errors import CheckpointError
from tokenmill.kernels.hadamard import inverse_signed_hadamard
from tokenmill.kernels.ref_codebook import unpack_indices
from tokenmill.model.formats.base import WeightFormat
from tokenmill.model.formats.bits import pack_bits, words_for
from tokenmill.model.formats.coded import CodedWeight, check_dimensions, stored_scales, stored_shape
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme

_NEEDED = ("weight_codes", "weight_norms", "weight_table", "weight_shape")
_ROTATION = "weight_rotation"
BITS = range(1, 9)


class CodebookWeight(CodedWeight):
    format_name = "codebook"

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self.words, self.norms, self.table = tensors["weight_codes"], tensors["weight_norms"], tensors["weight_table"]
        check_dimensions(prefix, tensors, weight_codes=2, weight_norms=2, weight_table=1)
        rows, columns = stored_shape(prefix, tensors["weight_shape"])
        bits = self.table.numel().bit_length() - 1
        if (
            bits not in BITS
            or self.table.numel() != 2**bits
            or self.words.shape != (rows, words_for(columns, bits))
            or self.norms.shape != (rows, 1)
        ):
            raise CheckpointError(f"{prefix}: codes, norms, table and shape do not fit together", "quantize it again")
        self.rotation = tensors.get(_ROTATION)
        self.seed = None if self.rotation is None else int(self.rotation)
        self.describe(Scheme("codebook", bits), (rows, columns), self.norms.dtype)

    def parts(self) -> dict[str, Tensor]:
        parts = {"codes": self.words, "norms": self.norms, "table": self.table}
        return parts if self.rotation is None else {**parts, "rotation": self.rotation}

    def decode(self, begin: int = 0, end: int | None = None) -> QuantizedMatrix:
        codes = unpack_indices(self.words[begin:end], self.table.numel(), self.in_features).to(torch.uint8)
        norms = self.norms[begin:end].float()
        return QuantizedMatrix(self.scheme, codes, norms, table=self.table.float(), rotation_seed=self.seed)

    def dequantize(self, begin: int, end: int) -> Tensor:
        rows = super().dequantize(begin, end)
        return rows if self.seed is None else inverse_signed_hadamard(rows, self.seed)


class CodebookFormat(WeightFormat):
    name = "codebook"

    @classmethod
    def tensor_names(cls, checkpoint: Checkpoint, prefix: str) -> list[str]:
        needed = [f"{prefix}.{suffix}" for suffix in _NEEDED]
        if any(name not in checkpoint for name in needed):
            return []
        rotation = f"{prefix}.{_ROTATION}"
        return [*needed, rotation] if rotation in checkpoint else needed

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str) -> CodebookWeight:
        names = cls.tensor_names(checkpoint, prefix)
        return CodebookWeight({name.removeprefix(f"{prefix}."): checkpoint.tensor(name).data for name in names}, prefix)

    @classmethod
    def encode(cls, matrix: QuantizedMatrix, scale_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        assert matrix.table is not None
        tensors = {
            "weight_codes": pack_bits(matrix.codes, matrix.scheme.bits),
            "weight_norms": stored_scales(matrix.scales, scale_dtype),
            "weight_table": matrix.table.float(),
            "weight_shape": torch.tensor(matrix.shape),
        }
        if matrix.rotation_seed is not None:
            tensors[_ROTATION] = torch.tensor([matrix.rotation_seed])
        return tensors
