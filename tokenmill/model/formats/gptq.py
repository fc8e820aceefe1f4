"""GPTQ files, versions 1 and 2: integers of 2, 3, 4 or 8 bits in 32-bit words that run down the input dimension.

qweight int32 [in * bits / 32, out], qzeros int32 [groups, out * bits / 32], scales [groups, out], g_idx int32 [in].
Version 1 stores every zero point minus one; the subtraction borrows between fields, so reading adds to 32-bit words.
Which version a file is, and whether it is symmetric, only its config says. A true activation order (g_idx that is not
column // group) is read and multiplied, but has no other form to convert to.
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

BITS = (2, 3, 4, 8)


class GptqWeight(CodedWeight):
    format_name = "gptq"

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        prefix: str,
        version: int = 1,
        symmetric: bool | None = None,
        group_size: int = 0,
    ) -> None:
        """`symmetric`: as the config states it, in which case qzeros are not looked at, as peers do; None: look."""
        check_dimensions(prefix, tensors, qweight=2, qzeros=2, scales=2, g_idx=1)
        self.words, self.scales, self.zero_words = tensors["qweight"], tensors["scales"], tensors["qzeros"]
        num_groups, rows = self.scales.shape
        bits = self.zero_words.shape[1] * 32 // rows
        columns = self.words.shape[0] * 32 // bits if bits else 0
        if bits not in BITS or self.words.shape[1] != rows or self.zero_words.shape[0] != num_groups:
            raise CheckpointError(
                f"{prefix}: qweight, qzeros and scales do not fit together as 2, 3, 4 or 8 bits", "download it again"
            )
        zeros = unpack_bits(_moved(self.zero_words, bits, 1) if version == 1 else self.zero_words, bits, rows).T
        if symmetric is None:
            symmetric = bool((zeros == 2 ** (bits - 1)).all())
        self.zeros = None if symmetric else zeros  # uint8 [out, groups]
        declared = group_size_of(columns, num_groups, group_size, prefix)
        self.order = _true_order(tensors.get("g_idx"), declared, columns)
        self.describe(Scheme("int", bits, declared, symmetric=symmetric), (rows, columns), self.scales.dtype)

    def parts(self) -> dict[str, Tensor]:
        parts = {"words": self.words, "scales": self.scales, "zeros": self.zero_words}
        return parts if self.order is None else {**parts, "order": self.order}

    def decode(self, begin: int = 0, end: int | None = None) -> QuantizedMatrix:
        if self.order is not None:
            raise CheckpointError(
                "groups in activation order (desc_act with groups) fit no other layout", "requantize without desc_act"
            )
        return self._in_order(begin, end)

    def dequantize(self, begin: int, end: int) -> Tensor:
        matrix = self._in_order(begin, end)
        if self.order is None:
            return matrix.dequantize()
        zeros = 2.0 ** (self.scheme.bits - 1) if matrix.zeros is None else matrix.zeros[:, self.order]
        return (matrix.codes.float() - zeros) * matrix.scales[:, self.order]

    def _in_order(self, begin: int, end: int | None) -> QuantizedMatrix:
        codes = unpack_bits(self.words[:, begin:end].T, self.scheme.bits, self.in_features)
        zeros = None if self.zeros is None else self.zeros[begin:end].float()
        return QuantizedMatrix(self.scheme, codes, self.scales[:, begin:end].T.float(), zeros)


class GptqFormat(WeightFormat):
    name = "gptq"

    @classmethod
    def tensor_names(cls, checkpoint: Checkpoint, prefix: str) -> list[str]:
        needed = [f"{prefix}.{suffix}" for suffix in ("qweight", "qzeros", "scales")]
        if any(name not in checkpoint for name in needed):
            return []
        words, scales = checkpoint.tensor(needed[0]), checkpoint.tensor(needed[2])
        # AWQ has the same three names; its words run across the outputs.
        if words.type_name != "I32" or len(words.shape) != 2 or words.shape[1:] != scales.shape[1:]:
            return []
        order = f"{prefix}.g_idx"
        return [*needed, order] if order in checkpoint else needed

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str) -> GptqWeight:
        names = cls.tensor_names(checkpoint, prefix)
        tensors = {name.removeprefix(f"{prefix}."): checkpoint.tensor(name).data for name in names}
        settings = checkpoint.quantization()
        version = 2 if settings.get("checkpoint_format") == "gptq_v2" else 1
        symmetric = True if settings.get("sym") is True else None
        declared = settings.get("group_size")
        return GptqWeight(tensors, prefix, version, symmetric, declared if isinstance(declared, int) else 0)

    @classmethod
    def encode(
        cls, matrix: QuantizedMatrix, scale_dtype: torch.dtype | None = None, version: int = 1
    ) -> dict[str, Tensor]:
        bits, columns = matrix.scheme.bits, matrix.shape[1]
        zeros = pack_bits(integer_zeros(matrix).T.contiguous(), bits)
        return {
            "qweight": pack_bits(matrix.codes, bits).T.contiguous(),
            "qzeros": _moved(zeros, bits, -1) if version == 1 else zeros,
            "scales": stored_scales(matrix.scales, scale_dtype).T.contiguous(),
            "g_idx": (torch.arange(columns) // (matrix.scheme.group_size or columns)).int(),
        }


def _moved(words: Tensor, bits: int, by: int) -> Tensor:
    """Every field of the rows of words with `by` (1 or -1) added."""
    count = words.shape[1] * 32 // bits
    if bits == 3:  # fields straddle words: each on its own
        return pack_bits((unpack_bits(words, bits, count) + by) & 7, bits)
    ones = pack_bits(torch.ones(count, dtype=torch.uint8), bits)
    return (words.long() + by * ones).to(torch.int32)  # carries and borrows as the other tools do


def _true_order(order: Tensor | None, group_size: int, columns: int) -> Tensor | None:
    """g_idx as int64 where it is a real permutation of groups; None where columns lie in natural order."""
    if order is None or not group_size:
        return None
    wide = order.long()
    if wide.numel() != columns or int(wide.min()) < 0 or int(wide.max()) >= -(-columns // group_size):
        raise CheckpointError(f"g_idx does not name a group for each of {columns} columns", "download it again")
    return None if torch.equal(wide, torch.arange(columns) // group_size) else wide
