"""Parts of matrices, as ranks hold them: some rows of any format, or some columns where the format can be cut there.

Every format gives its rows independently of each other, so outputs can be cut anywhere. Inputs can be cut only at the
borders of blocks or groups of scales, and only where the rounding of the input (if the scheme has one) does not depend
on columns that another rank has: `columns_problem` says why not. A part means exactly the numbers that it has in the
whole matrix. Used by model/rank_reader.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from math import lcm

import torch
from torch import Tensor

from tokenmill.kernels.ggml_types import TYPES
from tokenmill.kernels.rounding import CALIBRATED
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.codebook import CodebookWeight
from tokenmill.model.formats.coded import CodedWeight
from tokenmill.model.formats.dense import DenseWeight
from tokenmill.model.formats.ggml import GgmlWeight
from tokenmill.model.formats.gptq import GptqWeight
from tokenmill.model.formats.quantized import QuantizedMatrix

Rows = Sequence[range]  # one behind the other


def pick(values: Tensor, rows: Rows) -> Tensor:
    """These rows; a view where they are neighbours."""
    parts = [values[cut.start : cut.stop] for cut in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class CodedSlice(CodedWeight):
    """Rows and columns of a weight of codes and scales; unpacks what is needed of the whole one when it is read."""

    def __init__(self, whole: CodedWeight, rows: Rows, columns: range) -> None:
        self.format_name = whole.format_name
        self._whole, self._rows, self._columns = whole, tuple(rows), columns
        scheme = whole.scheme if whole.scheme.block_rows == 1 else replace(whole.scheme, block_rows=1)
        self.describe(scheme, (sum(map(len, rows)), len(columns)), whole.scale_dtype)
        self.type_name = whole.type_name  # what the file has
        self.input_scale, self.precise = whole.input_scale, whole.precise

    def parts(self) -> dict[str, Tensor]:
        return {}

    @property
    def nbytes(self) -> int:
        whole = self._whole
        return whole.nbytes * self.out_features * self.in_features // (whole.out_features * whole.in_features)

    def code_values(self) -> Tensor:
        return self._whole.code_values()

    def decode(self, begin: int = 0, end: int | None = None) -> QuantizedMatrix:
        parts = [self._decode(low, high) for low, high in self._within(begin, end)]
        if len(parts) == 1:
            return parts[0]
        zeros = None if parts[0].zeros is None else torch.cat([each.zeros for each in parts if each.zeros is not None])
        codes, scales = torch.cat([each.codes for each in parts]), torch.cat([each.scales for each in parts])
        return replace(parts[0], codes=codes, scales=scales, zeros=zeros)

    def dequantize(self, begin: int, end: int) -> Tensor:
        rows = [self._whole.dequantize(low, high) for low, high in self._within(begin, end)]
        return torch.cat(rows)[:, self._columns.start : self._columns.stop]

    def _within(self, begin: int, end: int | None) -> list[tuple[int, int]]:
        """Ranges of rows of the whole matrix that are rows [begin, end) of this part."""
        last, first = self.out_features if end is None else end, 0
        found: list[tuple[int, int]] = []
        for cut in self._rows:
            low, high = max(begin - first, 0), min(last - first, len(cut))
            if low < high:
                found.append((cut.start + low, cut.start + high))
            first += len(cut)
        return found

    def _decode(self, low: int, high: int) -> QuantizedMatrix:
        whole, count = self._whole, high - low
        block = whole.scheme.block_rows or whole.out_features
        first = low - low % block
        matrix = whole.decode(0 if not whole.scheme.block_rows else first, high)
        first = 0 if not whole.scheme.block_rows else first

        def by_row(shared: Tensor) -> Tensor:
            wide = shared if block == 1 else shared.repeat_interleave(block, 0)[low - first :][:count]
            return self._groups(wide[-count:] if block == 1 else wide)

        return replace(
            matrix,
            scheme=self.scheme,
            codes=matrix.codes[-count:, self._columns.start : self._columns.stop].contiguous(),
            scales=by_row(matrix.scales),
            zeros=None if matrix.zeros is None else by_row(matrix.zeros),
        )

    def _groups(self, shared: Tensor) -> Tensor:
        size = self.scheme.group_size
        if not size or shared.shape[1] == 1:
            return shared
        return shared[:, self._columns.start // size : -(-self._columns.stop // size)].contiguous()


def cut_rows(weight: LinearWeight, rows: Rows) -> LinearWeight:
    """These outputs, with their biases."""
    part: LinearWeight
    if isinstance(weight, DenseWeight | GgmlWeight | CodebookWeight):
        part = copy(weight)
        part.out_features, part.kernel = sum(map(len, rows)), None
        if isinstance(part, DenseWeight):
            part.values = pick(part.values, rows)
        elif isinstance(part, GgmlWeight):
            part.blocks = pick(part.blocks, rows)
        else:
            assert isinstance(part, CodebookWeight)
            part.words, part.norms = pick(part.words, rows), pick(part.norms, rows)
    else:
        assert isinstance(weight, CodedWeight), weight.format_name
        part = CodedSlice(weight, rows, range(weight.in_features))
    part.bias = None if weight.bias is None else pick(weight.bias, rows).contiguous()
    part.own = tuple(rows)
    return part


def cut_columns(weight: LinearWeight, columns: range) -> LinearWeight:
    """These inputs, without the bias; `columns_problem` has none with this width."""
    part: LinearWeight
    if isinstance(weight, DenseWeight):
        part = copy(weight)
        part.values = weight.values[:, columns.start : columns.stop].contiguous()
    elif isinstance(weight, GgmlWeight):
        part = copy(weight)
        row_bytes = weight.blocks.shape[1]
        begin, end = (place * row_bytes // weight.in_features for place in (columns.start, columns.stop))
        part.blocks = weight.blocks[:, begin:end].contiguous()
    else:
        assert isinstance(weight, CodedWeight), weight.format_name
        part = CodedSlice(weight, [range(weight.out_features)], columns)
    part.in_features, part.kernel, part.bias, part.own = len(columns), None, None, (columns,)
    return part


def columns_problem(weight: LinearWeight, width: int) -> str:
    """Why columns cannot be cut at every multiple of `width`; empty if they can."""
    if isinstance(weight, DenseWeight):
        return ""
    if isinstance(weight, GgmlWeight):
        block = TYPES[weight.type_name].block_size
        return f"{weight.type_name} has blocks of {block} columns" if width % block else ""
    if isinstance(weight, CodebookWeight):
        return "its rows are rotated as a whole"
    if not isinstance(weight, CodedWeight):
        return f"format {weight.format_name} has no columns to cut"
    if isinstance(weight, GptqWeight) and weight.order is not None:
        return "its groups are in activation order"
    if weight.activations not in ("none", *CALIBRATED):
        return f"its input is rounded by token ({weight.activations})"
    block = lcm(weight.scheme.group_size or 1, 2)
    return f"{weight.type_name} has groups of {block} columns" if width % block else ""
