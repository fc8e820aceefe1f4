"""The stores that vLLM calls turboquant_*: its slot layout and its simplification of the method.

Keys: a plain Hadamard matrix without signs, the normal codebook, the norm, and with "nc" the rounded direction brought
back to length one; in k8v4 just e4m3. Values: not rotated, uniform steps between minimum and maximum. Key and value
of a token share one slot of even length. The first and last two layers stay native unless the user says otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.kernels.cpu_pages import RowCode
from tokenmill.model.kvstore.float8 import E4M3, Float8Rows
from tokenmill.model.kvstore.int8 import round_away
from tokenmill.model.kvstore.packing import as_bytes, from_bytes, pack_codes, unpack_codes
from tokenmill.model.kvstore.rows import RowFormat, RowStore
from tokenmill.model.kvstore.turboquant import CodebookRows

_MIN_SCALE = 1e-6


class UniformRows(RowFormat):
    """minimum + code * step; step and minimum in half precision after the codes."""

    def __init__(self, head_dim: int, bits: int) -> None:
        super().__init__(head_dim)
        self._bits = bits

    @property
    def row_bytes(self) -> int:
        return self.head_dim * self._bits // 8 + 4

    def to_rows(self, heads: Tensor) -> Tensor:
        max_code = (1 << self._bits) - 1
        low = heads.amin(-1, keepdim=True).half()
        step = ((heads.amax(-1, keepdim=True) - low) / max_code).clamp(min=_MIN_SCALE).half()

        def rounder(values: Tensor) -> tuple[Tensor, Tensor]:
            codes = round_away((values - low) / step).clamp(0, max_code)
            return codes, codes * step + low

        codes = pack_codes(self.round(heads, rounder)[0], self._bits)
        return torch.cat((codes, as_bytes(torch.cat((step, low), -1))), -1)

    def from_rows(self, rows: Tensor) -> Tensor:
        split = self.row_bytes - 4
        numbers = from_bytes(rows[..., split:], torch.float16).float()
        return unpack_codes(rows[..., :split], self._bits) * numbers[..., :1] + numbers[..., 1:]

    def code(self) -> RowCode:
        return RowCode("uniform", self.head_dim, self._bits)


class _SlotStore(RowStore):
    joined = True
    conditioned = False
    edge_layers = 2
    key_bits: int
    value_bits: int

    @classmethod
    def formats(cls, layout: KVLayout) -> tuple[RowFormat, RowFormat]:
        dim = layout.head_dim
        values = UniformRows(dim, cls.value_bits)
        if cls.key_bits == 8:
            return Float8Rows(dim, E4M3), values
        return CodebookRows(dim, cls.key_bits, signed=False, renormalize=True), values


class TurboQuantK8V4Store(_SlotStore):
    name, key_bits, value_bits = "turboquant_k8v4", 8, 4


class TurboQuant4BitStore(_SlotStore):
    name, key_bits, value_bits = "turboquant_4bit_nc", 4, 4


class TurboQuantK3V4Store(_SlotStore):
    name, key_bits, value_bits = "turboquant_k3v4_nc", 3, 4


class TurboQuant3BitStore(_SlotStore):
    name, key_bits, value_bits = "turboquant_3bit_nc", 3, 3
