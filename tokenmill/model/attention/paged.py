"""Paged attention over stores that hold plain floats, by the op table's `attention`."""

from __future__ import annotations

from torch import Tensor

from tokenmill.kernels.base import select
from tokenmill.model.attention.base import AttentionBackend, AttentionSpec
from tokenmill.model.kvstore.base import KVStore
from tokenmill.types import Batch


class PagedAttention(AttentionBackend):
    name = "paged"

    def __init__(self, store: KVStore, kernels: str = "") -> None:
        super().__init__(store, kernels)
        self._attention = select("attention", store.where, kernels).run

    @classmethod
    def declines(cls, store: KVStore) -> str | None:
        k, _ = store.pages(0)
        return None if k.dtype.is_floating_point else f"{store.name} pages are not plain floats"

    def attend(self, q: Tensor, slot: int, block_table: Tensor, batch: Batch, spec: AttentionSpec) -> Tensor:
        k, v = self.store.pages(slot)
        result: Tensor = self._attention(
            q, k, v, block_table, batch.query_starts, batch.seq_lens, spec.scale, spec.window, spec.softcap
        )
        return result
