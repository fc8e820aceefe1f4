"""Weights of small codes with scales (GPTQ, AWQ, compressed-tensors, bitsandbytes, float8, ...) prepared for the C++
kernels: which kernel supports a scheme, and the codes in the form it reads.

Integers of 2 to 6 bits go to integer panels of as many bits (tables of 16 values to those of 4), 7 and 8 bits to those
of int8; what no integer panel holds exactly stays as it is and is multiplied in float32. Weights are unpacked a few
rows at a time. Called by cpu.py; knows no file format.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from tokenmill.errors import CheckpointError
from tokenmill.kernels.base import Declined

_PANEL_GROUP = 32  # columns that share a scale in the integer panels
_PANEL_INPUTS = ("none", "int8_token", "int8_static")
_CHUNK_VALUES = 1 << 22


class NumberScheme(Protocol):
    """See Scheme in model/formats/quantized.py."""

    @property
    def element(self) -> str: ...
    @property
    def bits(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def block_rows(self) -> int: ...
    @property
    def scale_type(self) -> str: ...


class CodedRows(Protocol):
    """See QuantizedMatrix in model/formats/quantized.py."""

    @property
    def codes(self) -> Tensor: ...
    @property
    def scales(self) -> Tensor: ...
    @property
    def zeros(self) -> Tensor | None: ...
    @property
    def global_scale(self) -> float: ...
    @property
    def rotation_seed(self) -> int | None: ...


@runtime_checkable
class CodedWeight(Protocol):
    """A weight that returns any of its rows as codes and scales."""

    out_features: int
    in_features: int
    precise: bool
    activations: str
    input_scale: float | None

    @property
    def scheme(self) -> NumberScheme: ...

    def decode(self, begin: int = 0, end: int | None = None) -> CodedRows: ...

    def code_values(self) -> Tensor:
        """float32: what each code stands for, before scaling. Only where codes index a table."""
        ...


def pack_coded(module: Any, weight: CodedWeight, isa: str = "") -> Any:
    """A `PackedLinear` of the C++ module; declines with a reason where no kernel is exact."""
    try:
        first = weight.decode(0, max(1, weight.scheme.block_rows))
    except CheckpointError as error:
        raise Declined(error.problem) from None
    if first.rotation_seed is not None:
        raise Declined("rows are rotated: the input would have to be rotated too")
    rounding = {"rounding": weight.activations, "input_scale": weight.input_scale or 0.0}
    group = weight.scheme.group_size or weight.in_features
    in_panels = group % _PANEL_GROUP == 0 and weight.in_features % group == 0 and weight.activations in _PANEL_INPUTS
    element = weight.scheme.element
    try:
        if element in ("nf4", "codebook", "e2m1"):
            return _pack_table(module, weight, first, in_panels, rounding, isa)
        if element == "e4m3":
            return _pack_float8(module, weight, rounding)
        return _pack_int(module, weight, in_panels, rounding, isa)
    except ValueError as error:
        raise Declined(str(error)) from None


def _pack_table(
    module: Any, weight: CodedWeight, first: CodedRows, in_panels: bool, rounding: dict[str, Any], isa: str
) -> Any:
    """Codes of 4 bits that index a table."""
    if weight.scheme.bits > 4:
        raise ValueError(f"no kernel for codebooks of {weight.scheme.bits} bits")
    if weight.scheme.element == "e2m1" and (weight.scheme.scale_type != "e8m0" or weight.activations != "none"):
        codes, scales, _ = _gather(weight, _nibbles)
        return module.PackedLinear.coded(
            "e2m1", codes, scales, weight.scheme.group_size, first.global_scale, **rounding
        )
    if not in_panels:
        raise ValueError(f"4-bit tables need a multiple of {_PANEL_GROUP} columns, and float or int8 inputs")
    codes, scales, _ = _gather(weight, _nibbles)
    table = torch.zeros(16)
    values = weight.code_values()
    table[: values.numel()] = values
    scales = scales * first.global_scale
    precise = weight.precise and weight.activations == "none"  # inputs that the scheme rounds are exact
    return module.PackedLinear.grouped(codes, scales, None, table, isa=isa, precise=precise, **rounding)


def _pack_float8(module: Any, weight: CodedWeight, rounding: dict[str, Any]) -> Any:
    codes, scales, _ = _gather(weight, lambda rows: rows.codes)
    return module.PackedLinear.coded("e4m3", codes, scales, weight.scheme.group_size or weight.in_features, **rounding)


def _pack_int(module: Any, weight: CodedWeight, in_panels: bool, rounding: dict[str, Any], isa: str) -> Any:
    bits = weight.scheme.bits
    precise = weight.precise and weight.activations == "none"  # inputs that the scheme rounds are exact
    if 2 <= bits <= 6 and in_panels:
        codes, scales, zeros = _gather(weight, _nibbles if bits == 4 else lambda rows: rows.codes)
        return module.PackedLinear.grouped(codes, scales, zeros, None, bits, isa=isa, precise=precise, **rounding)
    codes, scales, _ = _gather(weight, lambda rows: _signed(rows, bits, weight.scheme.group_size))
    if in_panels:
        return module.PackedLinear.int8(codes, scales, isa=isa, precise=precise, **rounding)
    group = weight.scheme.group_size or weight.in_features
    return module.PackedLinear.coded("int8", codes.view(torch.uint8), scales, group, **rounding)


def _gather(weight: CodedWeight, form: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes in the wanted form, scales, zeros), a row of each per row of the weight, unpacked chunk by chunk."""
    parts = [(form(rows), *_row_scales(rows, count)) for rows, count in _chunks(weight)]
    codes, scales, zeros = zip(*parts, strict=True)
    joined = None if zeros[0] is None else torch.cat(zeros)
    return torch.cat(codes), torch.cat(scales), joined


def _chunks(weight: CodedWeight) -> Iterator[tuple[CodedRows, int]]:
    """Rows a few at a time, and how many of them share a scale (0: all)."""
    block = max(1, weight.scheme.block_rows)
    step = -(-max(1, _CHUNK_VALUES // weight.in_features) // block) * block
    for begin in range(0, weight.out_features, step):
        yield weight.decode(begin, min(begin + step, weight.out_features)), weight.scheme.block_rows


def _row_scales(rows: CodedRows, block_rows: int) -> tuple[Tensor, Tensor | None]:
    """Scales and zeros [rows, groups], whatever blocks of rows share them."""
    count = rows.codes.shape[0]
    scales, zeros = rows.scales, rows.zeros
    if block_rows != 1:
        repeats = block_rows or count
        scales = scales.repeat_interleave(repeats, 0)[:count]
        zeros = None if zeros is None else zeros.repeat_interleave(repeats, 0)[:count]
    return scales.contiguous(), None if zeros is None else zeros.contiguous()


def _nibbles(rows: CodedRows) -> Tensor:
    return _paired(rows.codes)


def _paired(codes: Tensor) -> Tensor:
    """Two codes to a byte, the even column low."""
    return codes[:, 1::2] << 4 | codes[:, 0::2]


def _signed(rows: CodedRows, bits: int, group_size: int) -> Tensor:
    """code - zero as int8; declines where that does not fit."""
    zeros: int | Tensor = 2 ** (bits - 1)
    if rows.zeros is not None:
        if not torch.equal(rows.zeros, rows.zeros.round()):
            raise ValueError(f"{bits}-bit codes with zero points between codes have no kernel")
        size = group_size or rows.codes.shape[1]
        zeros = rows.zeros.short().repeat_interleave(size, 1)[:, : rows.codes.shape[1]]
    values = rows.codes.short() - zeros
    if int(values.min()) < -128 or int(values.max()) > 127:
        raise ValueError(f"asymmetric {bits}-bit codes minus their zero point exceed int8")
    return values.to(torch.int8)
