"""A store that keeps the first and last layers in 16-bit floats ("native") and the others in a coded store.

Quantizing hurts most where the model begins and ends. A layer slot is native if any of its layers is one of
those: with one group of layers these are exactly the requested layers; with sliding layers, groups share slots, and
more layers than requested stay native. Composes two stores; knows nothing of their formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.kernels.cpu_pages import CpuPages
from tokenmill.model.kvstore.base import KVStore
from tokenmill.types import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from tokenmill.kernels.packed_pages import PackedPages
    from tokenmill.model.kvstore.conditioning import KeyConditioning
    from tokenmill.model.kvstore.head_sample import HeadSample


def native_slots(layout: KVLayout, edge_layers: int) -> tuple[int, ...]:
    """Layer slots that hold one of the first or last `edge_layers` layers with KV pages."""
    layers = sorted(layer for group in layout.groups for layer in group.layers)
    edges = layers[:edge_layers] + layers[len(layers) - edge_layers :]
    return tuple(sorted({layout.place(layer)[1] for layer in edges}))


def split_layout(layout: KVLayout, edge_layers: int) -> tuple[KVLayout, KVLayout]:
    """The layouts of the native and of the coded slots, each with its own layers."""
    native = native_slots(layout, edge_layers)
    coded = [slot for slot in range(layout.layers_per_page) if slot not in native]

    def part(slots: Sequence[int]) -> KVLayout:
        groups = tuple(
            replace(group, layers=tuple(group.layers[slot] for slot in slots if slot < len(group.layers)))
            for group in layout.groups
        )
        return replace(layout, layers_per_page=len(slots), groups=groups)

    return part(native), part(coded)


class EdgeStore(KVStore):
    is_coded = True

    def __init__(self, layout: KVLayout, edge_layers: int, native: KVStore, coded: KVStore) -> None:
        """`native` and `coded` hold the layouts of `split_layout`, as many pages each."""
        super().__init__(layout, coded.num_pages, coded.device)
        self.name = coded.name
        self._stores = (native, coded)
        natives = native_slots(layout, edge_layers)
        coded_slots = [slot for slot in range(layout.layers_per_page) if slot not in natives]
        self._slots: dict[int, tuple[KVStore, int]] = {slot: (native, at) for at, slot in enumerate(natives)}
        self._slots |= {slot: (coded, at) for at, slot in enumerate(coded_slots)}

    @classmethod
    def page_bytes(cls, layout: KVLayout) -> int:
        raise NotImplementedError("depends on the two stores: see StoreChoice.page_bytes")

    def prepare(self, batch: Batch) -> None:
        for store in self._stores:
            store.prepare(batch)

    @property
    def conditions_keys(self) -> bool:
        return self._stores[1].conditions_keys

    def condition_keys(self, slot: int, conditioning: KeyConditioning) -> None:
        store, at = self._slots[slot]
        if store.conditions_keys:
            store.condition_keys(at, conditioning)

    @property
    def calibrates(self) -> bool:
        return self._stores[1].calibrates

    def calibrate(self, group: int, slot: int, sample: HeadSample) -> None:
        store, at = self._slots[slot]
        if store.calibrates:
            store.calibrate(group, at, sample)

    def write(self, slot: int, token_slots: Tensor, k: Tensor, v: Tensor) -> None:
        store, at = self._slots[slot]
        store.write(at, token_slots, k, v)

    def pages(self, slot: int) -> tuple[Tensor, Tensor]:
        store, at = self._slots[slot]
        return store.pages(at)

    def read(self, slot: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        store, at = self._slots[slot]
        return store.read(at, pages)

    def stored(self, slot: int) -> tuple[Tensor, Tensor]:
        store, at = self._slots[slot]
        return store.stored(at)

    def scales(self, slot: int) -> tuple[Tensor, Tensor] | None:
        store, at = self._slots[slot]
        return store.scales(at)

    def kernel_pages(self, slot: int) -> CpuPages | None:
        store, at = self._slots[slot]
        return store.kernel_pages(at)

    def gpu_declines(self, slot: int) -> str | None:
        store, at = self._slots[slot]
        return store.gpu_declines(at)

    def packed_pages(self, slot: int) -> PackedPages | None:
        store, at = self._slots[slot]
        return store.packed_pages(at)

    def meaning(self) -> str:
        slots = [slot for slot, (store, _) in self._slots.items() if store is self._stores[0]]
        return f"{self._stores[1].meaning()}-{self._stores[0].meaning()}-{slots}"

    def page_tensors(self) -> list[Tensor]:
        return [tensor for store in self._stores for tensor in store.page_tensors()]

    def before_export(self, pages: Sequence[int]) -> None:
        for store in self._stores:
            store.before_export(pages)

    def after_import(self, pages: Sequence[int]) -> None:
        for store in self._stores:
            store.after_import(pages)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        for store in self._stores:
            store.copy_pages(pairs)

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores)
