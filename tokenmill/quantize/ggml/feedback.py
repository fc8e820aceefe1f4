"""Error feedback on ggml's grids: GPTQ's recursion over columns, with the blocks of a ggml type as its groups.

A block's scales are searched as always, on the weights as earlier columns have left them; then its codes are chosen one
column after the other, each error pushed onto the columns still to come. The bytes are an ordinary block of the type.
llama.cpp's quantizers choose every code for itself. Used by feedback_job.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenmill.kernels.ggml_types import TYPES
from tokenmill.kernels.ref_ggml import IQ4_LEVELS
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.ggml.blocks import dequantize, quantize
from tokenmill.quantize.ggml.packing import pack_fields, pack_single_bits
from tokenmill.quantize.ggml.search import nearest_level
from tokenmill.quantize.methods.gptq import Columns, factor_hessian

_DAMPING = 0.01
_Field = tuple[int, Callable[[Tensor], Tensor]]  # where in a block its codes are, and how they are packed


def _nibbles(at: int, run: int) -> _Field:
    return at, lambda codes: pack_fields(codes & 15, run, 4)


# Type -> (number of levels, the fields of its codes).
_CODES: dict[str, tuple[int, list[_Field]]] = {
    "Q4_0": (16, [_nibbles(2, 16)]),
    "Q4_1": (16, [_nibbles(4, 16)]),
    "Q5_0": (32, [(2, lambda codes: pack_single_bits(codes >> 4)), _nibbles(6, 16)]),
    "Q5_1": (32, [(4, lambda codes: pack_single_bits(codes >> 4)), _nibbles(8, 16)]),
    "IQ4_NL": (16, [_nibbles(2, 16)]),
    "Q2_K": (4, [(16, lambda codes: pack_fields(codes, 32, 2))]),
    "Q3_K": (8, [(0, lambda codes: pack_fields(codes >> 2, 32, 1)), (32, lambda codes: pack_fields(codes & 3, 32, 2))]),
    "Q4_K": (16, [_nibbles(16, 32)]),
    "Q5_K": (32, [(16, lambda codes: pack_fields(codes >> 4, 32, 1)), _nibbles(48, 32)]),
    "Q6_K": (64, [_nibbles(0, 64), (128, lambda codes: pack_fields(codes >> 4, 32, 2))]),
    "IQ4_XS": (16, [_nibbles(8, 16)]),
}
FEEDBACK_TYPES = tuple(_CODES)  # Q8_0 errs too little to gain


def with_codes(type_name: str, packed: Tensor, codes: Tensor) -> Tensor:
    """Blocks [n, bytes] with other codes [n, block], uint8: all else stays."""
    changed = packed.clone()
    for at, pack in _CODES[type_name][1]:
        field = pack(codes)
        changed[:, at : at + field.shape[1]] = field
    return changed


class GGMLColumns(Columns):
    """The state of one solve on the blocks of a ggml type; `packed` has the bytes of each block in turn."""

    def __init__(self, weight: Tensor, factor: Tensor, type_name: str, importance: Tensor) -> None:
        super().__init__(weight, factor, Scheme("int", 8, TYPES[type_name].block_size), 0.0)
        self._type, self._importance = type_name, importance
        self._levels = _CODES[type_name][0]
        self._uneven = type_name.startswith("IQ4")
        self.packed: list[Tensor] = []

    def _choose(self, group: int) -> None:
        cut = slice(group * self.group, (group + 1) * self.group)
        packed = quantize(self._type, self.weight[cut].T.contiguous(), self._importance[cut])
        codes = torch.zeros(packed.shape[0], self.group, dtype=torch.uint8)
        lowest = dequantize(self._type, with_codes(self._type, packed, codes))
        if self._uneven:
            self._step, self._offset = (lowest / IQ4_LEVELS[0]).T.contiguous(), torch.zeros(())
        else:
            second = dequantize(self._type, with_codes(self._type, packed, codes + 1))
            self._step, self._offset = (second - lowest).T.contiguous(), lowest.T.contiguous()
        self.packed.append(packed)

    def round(self, column: int, value: Tensor, group: int) -> Tensor:
        del group
        row = column % self.group
        step = self._step[row]
        inverse = torch.where(step != 0, step.reciprocal(), 0.0)
        if self._uneven:
            code = nearest_level(value * inverse, IQ4_LEVELS)
            self.codes[column] = code.to(torch.uint8)
            return step * torch.tensor(IQ4_LEVELS, dtype=torch.float32)[code.long()]
        offset = self._offset[row]
        code = ((value - offset) * inverse).round_().clamp_(0, self._levels - 1)
        self.codes[column] = code.to(torch.uint8)
        return code.mul_(step).add_(offset)

    def finish(self) -> list[Tensor]:
        """The bytes of each block with the codes that were chosen."""
        codes = self.codes.T.contiguous().split(self.group, 1)
        return [with_codes(self._type, packed, each) for packed, each in zip(self.packed, codes, strict=True)]


class FeedbackFactor:
    """The factored statistics of one input, for all types of the matrices that read it. Blocks are solved from the one
    with the largest inputs, while the others can still compensate."""

    def __init__(self, hessian: Tensor) -> None:
        self._hessian, self._factors = hessian, dict[int, tuple[Tensor, Tensor]]()
        self.importance = hessian.diagonal().clone()

    def quantize(self, type_name: str, weight: Tensor) -> Tensor:
        """float32 [out, in] -> bytes [out, bytes per row]."""
        block = TYPES[type_name].block_size
        if block not in self._factors:
            blocks = self.importance.view(-1, block)
            outside = torch.argsort(blocks.amax(1), descending=True, stable=True)
            order = torch.arange(weight.shape[1]).view(-1, block)[outside].reshape(-1)
            self._factors[block] = factor_hessian(self._hessian, _DAMPING, order)[0], order
        factor, order = self._factors[block]
        state = GGMLColumns(weight.T[order].contiguous(), factor, type_name, self.importance[order])
        state.solve(0, weight.shape[1])
        places = torch.argsort(order[::block])
        parts = state.finish()
        return torch.cat([parts[place] for place in places.tolist()], 1)
