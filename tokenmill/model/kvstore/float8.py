"""KV pages in FP8 (e4m3): a byte a value, one scale per layer and KV head. Half of bfloat16, for GPUs.

The GPU executors write and read the bytes themselves (`stored`, `scales`); `write` and `pages` are the plain torch
twin of that. Scales are one: keys and values of trained models lie well within the 448 that e4m3 reaches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.model.kvstore.base import KVStore

_LIMIT = 448.0


class Float8Store(KVStore):
    name = "fp8"

    def __init__(self, layout: KVLayout, num_pages: int, where: torch.device, kernels: str = "") -> None:  # noqa: ARG002
        super().__init__(layout, num_pages, where)
        shape = (layout.layers_per_page, num_pages, layout.num_kv_heads, layout.page_size, layout.head_dim)
        self._k = torch.empty(shape, dtype=torch.float8_e4m3fn, device=where)
        self._v = torch.empty(shape, dtype=torch.float8_e4m3fn, device=where)
        heads = (layout.layers_per_page, layout.num_kv_heads)
        self._k_scale = torch.ones(heads, dtype=torch.float32, device=where)
        self._v_scale = torch.ones(heads, dtype=torch.float32, device=where)

    @classmethod
    def page_bytes(cls, layout: KVLayout) -> int:
        return layout.values_per_page

    def write(self, slot: int, token_slots: Tensor, k: Tensor, v: Tensor) -> None:
        size = self.layout.page_size
        for rows, pages, scale in ((k, self._k, self._k_scale), (v, self._v, self._v_scale)):
            heads = rows.float().view(rows.shape[0], self.layout.num_kv_heads, -1) / scale[slot][:, None]
            codes = heads.clamp(-_LIMIT, _LIMIT).to(torch.float8_e4m3fn).view(torch.uint8)
            pages[slot].view(torch.uint8)[token_slots // size, :, token_slots % size] = codes

    def pages(self, slot: int) -> tuple[Tensor, Tensor]:
        k, v = self._k[slot].float(), self._v[slot].float()
        return k * self._k_scale[slot][:, None, None], v * self._v_scale[slot][:, None, None]

    def stored(self, slot: int) -> tuple[Tensor, Tensor]:
        return self._k[slot], self._v[slot]

    def scales(self, slot: int) -> tuple[Tensor, Tensor]:
        return self._k_scale[slot], self._v_scale[slot]

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        for source, destination in pairs:
            for pages in (self._k.view(torch.uint8), self._v.view(torch.uint8)):
                pages[:, destination] = pages[:, source]

    @property
    def nbytes(self) -> int:
        return 2 * self._k.numel()
