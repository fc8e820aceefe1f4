"""AWQ "gemm" files: 4-bit integers in 32-bit words that run across the outputs, in an interleaved order.

qweight int32 [in, out / 8]: nibble i of word c is output 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]; qzeros int32
[groups, out / 8] likewise, the true zero points; scales [groups, out].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.errors import CheckpointError
from tokenmill.model.formats.base import WeightFormat
from tokenmill.model.formats.bits import pack_bits, unpack_bits
from tokenmill.model.formats.coded import CodedWeight, check_dimensions, group_size_of, integer_zeros, stored_scales
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the outputs in a word
_INVERSE = (0, 4, 1, 5, 2, 6, 3, 7)


class AwqWeight(CodedWeight):
    format_name = "awq"

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, group_size: int = 0) -> None:
        check_dimensions(prefix, tensors, qweight=2, qzeros=2, scales=2)
        self.words, self.scales, self.zero_words = tensors["qweight"], tensors["scales"], tensors["qzeros"]
        columns, rows = self.words.shape[0], self.words.shape[1] * 8
        num_groups = self.scales.shape[0]
        if self.scales.shape[1] != rows or self.zero_words.shape != (num_groups, rows // 8):
            raise CheckpointError(f"{prefix}: qweight, qzeros and scales do not fit together", "download it again")
        zeros = _unpack(self.zero_words).T  # uint8 [out, groups]
        self.zeros = None if bool((zeros == 8).all()) else zeros
        declared = group_size_of(columns, num_groups, group_size, prefix)
        scheme = Scheme("int", 4, declared, symmetric=self.zeros is None)
        self.describe(scheme, (rows, columns), self.scales.dtype)

    def parts(self) -> dict[str, Tensor]:
        return {"words": self.words, "scales": self.scales, "zeros": self.zero_words}

    def decode(self, begin: int = 0, end: int | None = None) -> QuantizedMatrix:
        last = self.out_features if end is None else end
        first = begin // 8
        codes = _unpack(self.words[:, first : -(-last // 8)])[:, begin - 8 * first : last - 8 * first]
        zeros = None if self.zeros is None else self.zeros[begin:last].float()
        return QuantizedMatrix(self.scheme, codes.T.contiguous(), self.scales[:, begin:last].T.float(), zeros)


class AwqFormat(WeightFormat):
    name = "awq"

    @classmethod
    def tensor_names(cls, checkpoint: Checkpoint, prefix: str) -> list[str]:
        names = [f"{prefix}.{suffix}" for suffix in ("qweight", "qzeros", "scales")]
        if any(name not in checkpoint for name in names):
            return []
        words, scales = checkpoint.tensor(names[0]), checkpoint.tensor(names[2])
        fits = len(words.shape) == 2 and len(scales.shape) == 2 and words.shape[1] * 8 == scales.shape[1]
        return names if words.type_name == "I32" and fits else []

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str) -> AwqWeight:
        tensors = {name: checkpoint.tensor(f"{prefix}.{name}").data for name in ("qweight", "qzeros", "scales")}
        settings = checkpoint.quantization()
        version = str(settings.get("version", "gemm")).lower()
        if version != "gemm":
            raise CheckpointError(f"{prefix}: AWQ files of version '{version}' are not read", "use the gemm version")
        declared = settings.get("group_size", settings.get("q_group_size"))
        return AwqWeight(tensors, prefix, declared if isinstance(declared, int) else 0)

    @classmethod
    def encode(cls, matrix: QuantizedMatrix, scale_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        return {
            "qweight": _pack(matrix.codes.T),
            "qzeros": _pack(integer_zeros(matrix).T),
            "scales": stored_scales(matrix.scales, scale_dtype).T.contiguous(),
        }


def _unpack(words: Tensor) -> Tensor:
    """int32 [n, out / 8] -> uint8 [n, out]."""
    codes = unpack_bits(words, 4, words.shape[1] * 8)
    return codes.unflatten(-1, (-1, 8))[..., _INVERSE].flatten(-2)


def _pack(codes: Tensor) -> Tensor:
    return pack_bits(codes.unflatten(-1, (-1, 8))[..., _ORDER].flatten(-2), 4)
