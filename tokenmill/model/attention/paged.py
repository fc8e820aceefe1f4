"""Paged attention by the op table's `attention`, over pages of plain floats.

Coded pages that no kernel reads are expanded first, those that the batch attends to and no others: right for every
store, at the price of a float copy of the attended context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.kernels.base import select
from tokenmill.model.attention.base import AttentionBackend, AttentionSpec
from tokenmill.model.kvstore.base import KVStore
from tokenmill.types import Batch


class PagedAttention(AttentionBackend):
    name = "paged"

    def __init__(self, store: KVStore, kernels: str = "") -> None:
        super().__init__(store, kernels)
        self._attention = select("attention", store.device, kernels).run

    @classmethod
    def declines(cls, _store: KVStore) -> str | None:
        return None

    def attend(self, q: Tensor, slot: int, block_table: Tensor, batch: Batch, spec: AttentionSpec) -> Tensor:
        k, v, block_table = float_pages(self.store, slot, block_table)
        lengths = (block_table, batch.query_starts, batch.seq_lens)
        result: Tensor = self._attention(
            q, k, v, *lengths, spec.scale, spec.window, spec.softcap, spec.chunk, spec.sinks
        )
        return result


def float_pages(store: KVStore, slot: int, block_table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """K and V as floats and the table of their pages; of coded pages only those in the table."""
    if not store.is_coded:
        return *store.pages(slot), block_table
    # Pages that left the window are -1 and stay so.
    numbers, indices = torch.unique(block_table.clamp(min=0), return_inverse=True)
    k, v = store.read(slot, numbers.long())
    return k, v, torch.where(block_table < 0, block_table, indices.to(block_table.dtype))
