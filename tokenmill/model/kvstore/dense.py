"""KV pages as plain floats: float32, float16 or bfloat16."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.kernels import cpu
from tokenmill.kernels.base import select
from tokenmill.kernels.cpu_pages import CpuPages
from tokenmill.model.kvstore.base import KVStore


class DenseStore(KVStore):
    on_gpu = True
    supports = frozenset({"latent rows"})
    dtype: ClassVar[torch.dtype]

    def __init__(
        self, layout: KVLayout, num_pages: int, device: torch.device, kernels: str = "", sequences: int = 1
    ) -> None:
        super().__init__(layout, num_pages, device, kernels, sequences)
        shape = (layout.layers_per_page, num_pages, layout.num_kv_heads, layout.page_size, layout.head_dim)
        # Not zeroed on purpose: the operating system allocates memory only for pages that are written.
        self._k = torch.empty(shape, dtype=self.dtype, device=device)
        self._v = self._k if layout.is_latent else torch.empty(shape, dtype=self.dtype, device=device)
        self._store = select("store_kv", device, kernels).run

    @classmethod
    def page_bytes(cls, layout: KVLayout) -> int:
        return layout.values_per_page * cls.dtype.itemsize

    def write(self, slot: int, token_slots: Tensor, k: Tensor, v: Tensor) -> None:
        self._store(k, self._k[slot], token_slots)
        if self._v is not self._k:
            self._store(v, self._v[slot], token_slots)

    def pages(self, slot: int) -> tuple[Tensor, Tensor]:
        return self._k[slot], self._v[slot]

    def kernel_pages(self, slot: int) -> CpuPages | None:
        return None if cpu.unavailable(self.device) else CpuPages(*self.pages(slot))

    def page_tensors(self) -> list[Tensor]:
        return [self._k] if self._v is self._k else [self._k, self._v]

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        # In order, one by one: a later pair may copy from an earlier destination.
        for source, destination in pairs:
            for tensor in self.page_tensors():
                tensor[:, destination] = tensor[:, source]

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.page_tensors())


class Float32Store(DenseStore):
    name = "float32"
    dtype = torch.float32


class Float16Store(DenseStore):
    name = "float16"
    dtype = torch.float16


class BFloat16Store(DenseStore):
    name = "bfloat16"
    dtype = torch.bfloat16
