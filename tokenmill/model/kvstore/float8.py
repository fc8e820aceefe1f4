"""KV pages in FP8: a byte a value. e4m3 with one scale per layer and KV head, e5m2, and e4m3 with a scale per row.

`fp8` takes its scales from the checkpoint where it brings calibrated ones (checkpoint_scales.py); else they are one:
keys and values of trained models lie well within the 448 that e4m3 reaches. The GPU executors write and read the e4m3
bytes themselves (`stored`, `scales`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.kernels.cpu_pages import RowCode
from tokenmill.kernels.gpu_generation import declines_float8
from tokenmill.model.kvstore.packing import as_bytes, from_bytes
from tokenmill.model.kvstore.rows import RowFormat, RowStore

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_KINDS = {E4M3: "float8_e4m3", E5M2: "float8_e5m2"}
SMALLEST_SCALE = 1e-6


class Float8Rows(RowFormat):
    """value / scale of its KV head, saturated."""

    def __init__(self, head_dim: int, dtype: torch.dtype, scales: Tensor | None = None) -> None:
        """`scales`: float32 [kv_heads]; None: one."""
        super().__init__(head_dim)
        self.dtype, self.scales = dtype, scales
        self._limit = torch.finfo(dtype).max

    @property
    def row_bytes(self) -> int:
        return self.head_dim

    def to_rows(self, heads: Tensor) -> Tensor:
        scale: Tensor | float = 1.0 if self.scales is None else self.scales[:, None]

        def rounder(values: Tensor) -> tuple[Tensor, Tensor]:
            codes = (values / scale).clamp(-self._limit, self._limit).to(self.dtype)
            return codes.view(torch.uint8), codes.float() * scale

        return self.round(heads, rounder)[0]

    def from_rows(self, rows: Tensor) -> Tensor:
        values = rows.contiguous().view(self.dtype).float()
        return values if self.scales is None else values * self.scales[:, None, None]

    def code(self) -> RowCode:
        return RowCode(_KINDS[self.dtype], self.head_dim, 8, head_scales=self.scales)

    def constants(self) -> list[Tensor]:
        return [*super().constants(), *([] if self.scales is None else [self.scales])]


class ScaledFloat8Rows(RowFormat):
    """e4m3, and behind the values the row's own scale in float32: max |x| / 448."""

    @property
    def row_bytes(self) -> int:
        return self.head_dim + 4

    def to_rows(self, heads: Tensor) -> Tensor:
        scale = (heads.abs().amax(-1, keepdim=True) / 448.0).clamp(min=SMALLEST_SCALE)

        def rounder(values: Tensor) -> tuple[Tensor, Tensor]:
            codes = (values / scale).clamp(-448.0, 448.0).to(E4M3)
            return codes.view(torch.uint8), codes.float() * scale

        return torch.cat((self.round(heads, rounder)[0], as_bytes(scale)), -1)

    def from_rows(self, rows: Tensor) -> Tensor:
        codes = rows[..., : self.head_dim].contiguous().view(E4M3).float()
        return codes * from_bytes(rows[..., self.head_dim :], torch.float32)

    def code(self) -> RowCode:
        return RowCode(_KINDS[E4M3], self.head_dim, 8, scale_bytes=4)


class Float8Store(RowStore):
    name = "fp8"
    on_gpu = True
    supports = frozenset({"latent rows"})

    def __init__(
        self, layout: KVLayout, num_pages: int, device: torch.device, kernels: str = "", sequences: int = 1
    ) -> None:
        super().__init__(layout, num_pages, device, kernels, sequences)
        ones = torch.ones(layout.num_kv_heads, device=device)
        self._scales = [(ones, ones)] * layout.layers_per_page

    @classmethod
    def formats(cls, layout: KVLayout) -> tuple[RowFormat, RowFormat]:
        rows = Float8Rows(layout.head_dim, E4M3)
        return rows, rows

    def set_scales(self, slot: int, k: Tensor, v: Tensor) -> None:
        """float32 [kv_heads] each, before anything is written."""
        scales = (k.to(self.device), (k if self.layout.is_latent else v).to(self.device))
        formats = [Float8Rows(self.layout.head_dim, E4M3, each) for each in scales]
        self._scales[slot] = scales
        self.use_formats(slot, formats[0], formats[1])

    def gpu_declines(self, slot: int) -> str | None:
        if self._backend == "triton":
            return declines_float8(self.device.type)
        return super().gpu_declines(slot)

    def stored(self, slot: int) -> tuple[Tensor, Tensor]:
        return self._k[slot].view(E4M3), self._v[slot].view(E4M3)

    def scales(self, slot: int) -> tuple[Tensor, Tensor]:
        return self._scales[slot]


class Float8E5M2Store(RowStore):
    name = "fp8_e5m2"
    supports = frozenset({"latent rows"})

    @classmethod
    def formats(cls, layout: KVLayout) -> tuple[RowFormat, RowFormat]:
        rows = Float8Rows(layout.head_dim, E5M2)
        return rows, rows


class Float8PerTokenHeadStore(RowStore):
    name = "fp8_per_token_head"
    supports = frozenset({"latent rows"})

    @classmethod
    def formats(cls, layout: KVLayout) -> tuple[RowFormat, RowFormat]:
        rows = ScaledFloat8Rows(layout.head_dim)
        return rows, rows
