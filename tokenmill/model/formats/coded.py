"""What the quantized formats share: a weight that can give its rows as a QuantizedMatrix, and the names of its types.

A format keeps the tensors of the file as they are mapped; `decode` unpacks a range of rows, and everything else
(dequantizing, converting, repacking for a kernel) is built on it. Knows nothing of files or of names of tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from tokenmill.errors import CheckpointError
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme, table_values


class CodedWeight(LinearWeight):
    """Codes with scales. Subclasses set `scheme`, `scale_dtype` and the shape through `describe`."""

    scheme: Scheme
    scale_dtype: torch.dtype  # of the scales in the file

    def describe(self, scheme: Scheme, shape: tuple[int, int], scale_dtype: torch.dtype) -> None:
        self.scheme = scheme
        self.type_name = type_name(scheme)
        self.activations = scheme.activations
        self.out_features, self.in_features = shape
        self.scale_dtype = scale_dtype

    @abstractmethod
    def decode(self, begin: int = 0, end: int | None = None) -> QuantizedMatrix:
        """Rows [begin, end) as codes and scales; `begin` is a multiple of the scheme's block_rows."""

    def code_values(self) -> Tensor:
        """float32: what each code stands for, before scaling. Only where codes index a table."""
        return table_values(self.decode(0, 1))

    def dequantize(self, begin: int, end: int) -> Tensor:
        first = begin - begin % max(1, self.scheme.block_rows)
        return self.decode(first, end).dequantize()[begin - first :]

    def dequantize_rows(self, rows: Tensor) -> Tensor:
        if rows.numel() == 0:
            return torch.empty(0, self.in_features)
        return torch.cat([self.dequantize(row, row + 1) for row in rows.tolist()])


def check_dimensions(prefix: str, tensors: Mapping[str, Tensor], **dimensions: int) -> None:
    """Reject a file whose tensors (by suffix, those present) are empty or have another number of dimensions."""
    for suffix, expected in dimensions.items():
        part = tensors.get(suffix)
        if part is not None and (part.dim() != expected or part.numel() == 0):
            raise CheckpointError(
                f"{prefix}.{suffix} has shape {list(part.shape)}", "the file is damaged: fetch it again"
            )


def stored_shape(prefix: str, shape: Tensor) -> tuple[int, int]:
    """The shape of a matrix from the tensor that states it."""
    sizes = [int(size) for size in shape.flatten().tolist()]
    if len(sizes) != 2 or min(sizes) <= 0:
        raise CheckpointError(f"{prefix}: {sizes} is not the shape of a matrix", "the file is damaged: fetch it again")
    return sizes[0], sizes[1]


def scalar(prefix: str, tensors: Mapping[str, Tensor], suffix: str) -> float | None:
    """A tensor of one number, if it is there."""
    part = tensors.get(suffix)
    if part is None:
        return None
    if part.numel() != 1:
        raise CheckpointError(f"{prefix}.{suffix} has shape {list(part.shape)}, not one number", "requantize the model")
    return float(part)


def type_name(scheme: Scheme) -> str:
    """A name for people: "INT4_G128", "INT8_CHANNEL", "FP8_BLOCK", "NVFP4", "NF4", ..."""
    if scheme.element == "e2m1":
        return "MXFP4" if scheme.scale_type == "e8m0" else "NVFP4"
    if scheme.element == "nf4":
        return "NF4"
    if scheme.element == "e4m3" and scheme.scale_type == "e8m0" and scheme.block_rows == 1:
        return "MXFP8"
    if scheme.element == "float":
        return f"FLOAT_{scheme.sparsity}" if scheme.sparsity else "FLOAT"
    kind = {"int": f"INT{scheme.bits}", "e4m3": "FP8", "codebook": f"CODEBOOK{scheme.bits}"}[scheme.element]
    if scheme.block_rows > 1:
        return f"{kind}_BLOCK"
    shared = f"G{scheme.group_size}" if scheme.group_size else "CHANNEL" if scheme.block_rows else "TENSOR"
    return f"{kind}_{shared}" + ("" if scheme.symmetric else "_ASYM")


def stored_scales(scales: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Scales in the type of a file: as asked, else the smallest float type that loses nothing."""
    for candidate in (dtype,) if dtype is not None else (torch.float16, torch.bfloat16):
        narrow = scales.to(candidate)
        if dtype is not None or torch.equal(narrow.float(), scales):
            return narrow
    return scales.float()


def group_size_of(columns: int, num_groups: int, declared: object, prefix: str) -> int:
    """Columns per scale: as the config declares, if that fits the number of scales, else evenly. 0: the entire row."""
    if num_groups == 1:
        return 0
    if isinstance(declared, int) and declared > 0 and -(-columns // declared) == num_groups:
        return declared
    if columns % num_groups:
        raise CheckpointError(
            f"{prefix} has {num_groups} groups of scales for {columns} columns", "state group_size in the config"
        )
    return columns // num_groups


def integer_zeros(matrix: QuantizedMatrix) -> Tensor:
    """Zero points as uint8 codes [out, groups], symmetric ones in the middle; asserts that they are codes."""
    if matrix.zeros is None:
        return torch.full(matrix.scales.shape, 2 ** (matrix.scheme.bits - 1), dtype=torch.uint8)
    zeros = matrix.zeros
    assert torch.equal(zeros, zeros.round()), "zero points must be integers in this format"
    assert zeros.min() >= 0, "zero points must be codes in this format"
    assert zeros.max() < 2**matrix.scheme.bits, "zero points must be codes in this format"
    return zeros.to(torch.uint8)
