"""KV pages in int8 with one scale per token and KV head, behind the row's codes.

`int8` holds the scale in half precision (66 bytes for a head of 64), `int8_per_token_head` in float32, as vLLM's store
of that name does (68 bytes). Codes are the same up to the rounding of the scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.kernels.cpu_pages import RowCode
from tokenmill.kernels.packed_pages import INT8_FLOAT, INT8_HALF, PackedRows
from tokenmill.model.kvstore.packing import as_bytes, from_bytes
from tokenmill.model.kvstore.rows import RowFormat, RowStore

_MIN_SCALE = 1e-6


def round_away(values: Tensor) -> Tensor:
    """To the nearest whole number, halves away from zero."""
    return torch.trunc(values + torch.copysign(torch.full_like(values, 0.5), values))


class Int8Rows(RowFormat):
    def __init__(self, head_dim: int, scale_dtype: torch.dtype) -> None:
        super().__init__(head_dim)
        self._scale_dtype = scale_dtype

    @property
    def row_bytes(self) -> int:
        return self.head_dim + self._scale_dtype.itemsize

    def to_rows(self, heads: Tensor) -> Tensor:
        scale = (heads.abs().amax(-1, keepdim=True) / 127.0).clamp(min=_MIN_SCALE).to(self._scale_dtype)

        def rounder(values: Tensor) -> tuple[Tensor, Tensor]:
            codes = round_away(values / scale.float()).clamp(-127, 127)
            return codes.to(torch.int8).view(torch.uint8), codes * scale.float()

        return torch.cat((self.round(heads, rounder)[0], as_bytes(scale)), -1)

    def from_rows(self, rows: Tensor) -> Tensor:
        codes = rows[..., : self.head_dim].contiguous().view(torch.int8).float()
        return codes * from_bytes(rows[..., self.head_dim :], self._scale_dtype).float()

    @property
    def code_bytes(self) -> int:
        return self.head_dim

    def packed(self, device: torch.device) -> PackedRows:  # noqa: ARG002
        return PackedRows(INT8_HALF if self._scale_dtype == torch.float16 else INT8_FLOAT, self.head_dim)

    def code(self) -> RowCode:
        return RowCode("int8", self.head_dim, 8, scale_bytes=self._scale_dtype.itemsize)


class Int8Store(RowStore):
    name = "int8"
    on_gpu = True

    @classmethod
    def formats(cls, layout: KVLayout) -> tuple[RowFormat, RowFormat]:
        rows = Int8Rows(layout.head_dim, torch.float16)
        return rows, rows


class Int8PerTokenHeadStore(RowStore):
    name = "int8_per_token_head"
    on_gpu = True

    @classmethod
    def formats(cls, layout: KVLayout) -> tuple[RowFormat, RowFormat]:
        rows = Int8Rows(layout.head_dim, torch.float32)
        return rows, rows
