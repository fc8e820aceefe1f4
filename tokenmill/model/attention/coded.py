"""Attention over coded pages by the C++ kernels, which expand the rows they attend to on the way."""

from __future__ import annotations

from torch import Tensor

from tokenmill.model.attention.base import AttentionBackend, AttentionSpec
from tokenmill.model.kvstore.base import KVStore
from tokenmill.types import Batch


class CodedAttention(AttentionBackend):
    name = "coded"

    def __init__(self, store: KVStore, kernels: str = "") -> None:
        super().__init__(store, kernels)
        self._pages = [store.kernel_pages(slot) for slot in range(store.layout.layers_per_page)]

    @classmethod
    def declines(cls, store: KVStore) -> str | None:
        if not store.is_coded:
            return f"{store.name} pages are plain floats"
        if any(store.kernel_pages(slot) is None for slot in range(store.layout.layers_per_page)):
            return f"{store.name} pages have no C++ kernel here"
        return None

    def attend(self, q: Tensor, slot: int, block_table: Tensor, batch: Batch, spec: AttentionSpec) -> Tensor:
        pages = self._pages[slot]
        assert pages is not None
        lengths = (block_table, batch.query_starts, batch.seq_lens)
        return pages.attention(q, *lengths, spec.scale, spec.window, spec.softcap, spec.chunk, spec.sinks)
