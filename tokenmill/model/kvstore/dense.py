"""KV pages as plain floats: float32, float16 or bfloat16."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar

from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.kernels import cpu
from tokenmill.kernels.base import select
from tokenmill.kernels.cpu_pages import CpuPages
from tokenmill.kernels.host import Device, NeedsTorch, empty, on_host
from tokenmill.model.kvstore.base import KVStore

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class DenseStore(KVStore):
    on_gpu = True
    supports = frozenset({"latent rows"})
    element: ClassVar[str]  # the dtype's name in torch, and in numpy where that has it
    element_bytes: ClassVar[int]

    def __init__(self, layout: KVLayout, num_pages: int, device: Device, kernels: str = "", sequences: int = 1) -> None:
        super().__init__(layout, num_pages, device, kernels, sequences)
        shape = (layout.layers_per_page, num_pages, layout.num_kv_heads, layout.page_size, layout.head_dim)
        # Not zeroed on purpose: the operating system allocates memory only for pages that are written.
        self._k = self._empty(shape)
        self._v = self._k if layout.is_latent else self._empty(shape)
        self._store = select("store_kv", device, kernels).run

    def _empty(self, shape: tuple[int, ...]) -> Any:
        if on_host(self.device):
            if self.element == "bfloat16":
                raise NeedsTorch("KV pages of type bfloat16 need it")
            return empty(shape, self.element)
        import torch

        return torch.empty(shape, dtype=getattr(torch, self.element), device=self.device)

    def as_tensors(self, device: torch.device) -> DenseStore:
        import torch

        twin = copy.copy(self)
        twin.device = device
        twin._k = torch.from_numpy(self._k)
        twin._v = twin._k if self._v is self._k else torch.from_numpy(self._v)
        return twin

    @classmethod
    def page_bytes(cls, layout: KVLayout) -> int:
        return layout.values_per_page * cls.element_bytes

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

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.page_tensors())


class Float32Store(DenseStore):
    name = "float32"
    element, element_bytes = "float32", 4


class Float16Store(DenseStore):
    name = "float16"
    element, element_bytes = "float16", 2


class BFloat16Store(DenseStore):
    name = "bfloat16"
    element, element_bytes = "bfloat16", 2
