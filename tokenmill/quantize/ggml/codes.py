"""Integer and MXFP4 matrices <-> ggml blocks, code by code: nothing is rounded but scales and offsets, to float16.

Larger groups repeat their scale in each block of 32; codes of fewer bits are shifted to the middle of the range.
Asymmetric ints become a scale and an offset (Q4_1, Q5_1). Knows nothing of files. Called by `convert`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.kernels.ggml_types import TYPES
from tokenmill.model.formats.bits import unpack_bits
from tokenmill.model.formats.float8 import exponents, multipliers
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.ggml.packing import half_bytes, pack_fields, pack_single_bits

BLOCK = 32
_SYMMETRIC = {"Q4_0": 4, "Q5_0": 5, "Q8_0": 8}
_WITH_OFFSET = {"Q4_1": 4, "Q5_1": 5}
MXFP4 = Scheme("e2m1", 4, BLOCK, scale_type="e8m0")


def type_for(scheme: Scheme, columns: int) -> str | None:
    """The ggml type that holds the codes of this scheme unchanged, or None."""
    if scheme.block_rows != 1 or columns % BLOCK or scheme.group_size % BLOCK:
        return None
    if scheme.element == "e2m1":
        return "MXFP4" if scheme.scale_type == "e8m0" else None
    if scheme.element != "int":
        return None
    wide_enough = [
        name for name, bits in (_SYMMETRIC if scheme.symmetric else _WITH_OFFSET).items() if bits >= scheme.bits
    ]
    return wide_enough[0] if wide_enough else None


def scheme_of(type_name: str) -> Scheme | None:
    """The scheme of a ggml type whose blocks are codes under one scale; None for all others."""
    if type_name == "MXFP4":
        return MXFP4
    return Scheme("int", _SYMMETRIC[type_name], BLOCK) if type_name in _SYMMETRIC else None


def decode_blocks(type_name: str, data: Tensor) -> QuantizedMatrix:
    """`data`: uint8 [rows, bytes] of a type for which `scheme_of` is not None."""
    scheme = scheme_of(type_name)
    assert scheme is not None, type_name
    rows = data.shape[0]
    blocks = data.reshape(-1, TYPES[type_name].block_bytes)
    if type_name == "MXFP4":
        codes, scales = _nibbles(blocks[:, 1:]), multipliers(blocks[:, 0].contiguous())
    else:
        scales = blocks[:, :2].contiguous().view(torch.float16).float()
        if type_name == "Q8_0":
            codes = blocks[:, 2:] ^ 0x80
        elif type_name == "Q5_0":
            codes = _nibbles(blocks[:, 6:]) | _single_bits(blocks[:, 2:6]) << 4
        else:
            codes = _nibbles(blocks[:, 2:])
    return QuantizedMatrix(scheme, codes.reshape(rows, -1), scales.reshape(rows, -1))


def encode_blocks(type_name: str, matrix: QuantizedMatrix) -> Tensor:
    """uint8 [rows, bytes]; the type must be the matrix's `type_for`."""
    rows, columns = matrix.shape
    codes = matrix.codes.reshape(-1, BLOCK)
    scales = _per_block(matrix.scales, columns)
    if type_name == "MXFP4":
        packed = torch.cat([exponents(scales).unsqueeze(1), pack_fields(codes, 16, 4)], 1)
        return packed.reshape(rows, -1)
    if type_name in _WITH_OFFSET:
        assert matrix.zeros is not None
        stored = scales.half().float()
        head = [half_bytes(scales), half_bytes(-stored * _per_block(matrix.zeros, columns))]
    else:
        head = [half_bytes(scales)]
        codes = codes + (2 ** (_SYMMETRIC[type_name] - 1) - 2 ** (matrix.scheme.bits - 1))
    if type_name == "Q8_0":
        body = [codes ^ 0x80]
    else:
        high = [pack_single_bits(codes >> 4)] if type_name.startswith("Q5") else []
        body = [*high, pack_fields(codes & 15, 16, 4)]
    return torch.cat([*head, *body], 1).reshape(rows, -1)


def _per_block(shared: Tensor, columns: int) -> Tensor:
    """[rows, groups] -> one value for each block of 32 of all rows."""
    return shared.repeat_interleave(columns // BLOCK // shared.shape[1], 1).reshape(-1)


def _nibbles(data: Tensor) -> Tensor:
    """[B, 16] bytes -> [B, 32]: the low halves first."""
    return torch.cat([data & 15, data >> 4], 1)


def _single_bits(data: Tensor) -> Tensor:
    return unpack_bits(data.contiguous().view(torch.int32), 1, BLOCK)
