"""From the resolved options to a store: its dtype, and how many layers at each end stay in 16-bit floats.

The bytes that the memory model counts and the store that is then built come from one `StoreChoice`. Called by the
construction of the runtime and by `inspect`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import KVLayout, LayerKV, build_layout
from tokenmill.kernels.host import Device
from tokenmill.model.attention import choose_attention
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.kvstore.edges import EdgeStore, native_slots, split_layout

if TYPE_CHECKING:
    from tokenmill.model.kvstore.base import KVStore


@dataclass(frozen=True, slots=True)
class StoreChoice:
    dtype: str  # of KV_STORES
    native: str  # of the edge layers
    edge_layers: int

    @property
    def _store(self) -> Any:
        return KV_STORES.get(self.dtype)

    @property
    def name(self) -> str:
        name: str = self._store.name
        return name

    def page_bytes(self, layout: KVLayout) -> int:
        if not self.edge_layers:
            size: int = self._store.page_bytes(layout)
            return size
        native, coded = split_layout(layout, self.edge_layers)
        total: int = KV_STORES.get(self.native).page_bytes(native) + self._store.page_bytes(coded)
        return total

    def fixed_bytes(self, layout: KVLayout, sequences: int) -> int:
        coded = split_layout(layout, self.edge_layers)[1] if self.edge_layers else layout
        size: int = self._store.fixed_bytes(coded, sequences)
        return size

    def build(self, layout: KVLayout, num_pages: int, device: Device, kernels: str, sequences: int) -> KVStore:
        if not self.edge_layers:
            store: KVStore = self._store(layout, num_pages, device, kernels, sequences)
            return store
        native, coded = split_layout(layout, self.edge_layers)
        return EdgeStore(
            layout,
            self.edge_layers,
            KV_STORES.get(self.native)(native, num_pages, device, kernels, sequences),
            self._store(coded, num_pages, device, kernels, sequences),
        )


def page_multiple(dtype: str) -> int:
    """The page size of this KV dtype must be a multiple of this, in tokens."""
    multiple: int = KV_STORES.get(dtype).page_multiple
    return multiple


def choose_store(
    dtype: str, edge_layers: int | None, layers: list[LayerKV], device: Device, computed: str = ""
) -> StoreChoice:
    """`edge_layers`: at each end, kept in 16 bits. None: what the store recommends where all layers are alike.
    `computed`: the type of activations."""
    on_gpu = device.type == "cuda"
    store = KV_STORES.get(dtype)
    if not store.is_coded:
        edge_layers = 0
    elif edge_layers is None:
        edge_layers = store.edge_layers if len(set(layers)) == 1 and 2 * store.edge_layers < len(layers) else 0
    layout = build_layout(layers, page_size=1)
    if store.is_coded and not any(group.layers for group in layout.groups):
        raise UserError(
            f"this model keeps no keys and values that KV pages of type {dtype} could hold",
            "leave --kv-cache-dtype out",
        )
    if declined := store.declines(layout):
        raise UserError(
            f"KV pages of type {dtype} do not support this model's {declined}", "use another --kv-cache-dtype"
        )
    if edge_layers and len(native_slots(layout, edge_layers)) == layout.layers_per_page:
        raise UserError(
            f"{edge_layers} native layers at either end of {len(layers)} leave none to quantize",
            "lower --kv-native-layers, or use --kv-cache-dtype float16",
        )
    return StoreChoice(dtype, "bfloat16" if on_gpu and computed != "float16" else "float16", edge_layers)


def reading_path(store: KVStore) -> str:
    """In words: what attention does with the pages of this store."""
    if not store.is_coded:
        return "plain floats"
    if any(store.packed_pages(slot) is not None for slot in range(store.layout.layers_per_page)):
        return "Triton multiplies the codes directly"
    if store.device.type == "cuda" and not any(map(store.gpu_declines, range(store.layout.layers_per_page))):
        return "Triton widens the FP8 values while multiplying"
    backend = choose_attention(store)
    if backend.name == "coded":
        return "C++ expands the rows it attends to"
    return "torch expands the attended pages before attention"


def native_layer_count(layout: KVLayout, edge_layers: int) -> int:
    """Layers that actually stay native: groups share slots, so these may be more than requested."""
    slots = native_slots(layout, edge_layers) if edge_layers else ()
    return sum(layout.place(layer)[1] in slots for group in layout.groups for layer in group.layers)
