"""The target's KV pages as a draft head sees them, on a GPU: float, fp8 and quantized pages by the step's own kernels.

Nothing waits for the host, so this can be part of a captured step. The GPU form of page_views.py, for captured_heads.py
and for drafts outside a captured step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmill.kernels import triton as gpu
from tokenmill.kernels.packed_pages import PackedPages
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.speculation.head_modules import Attend
from tokenmill.runtime.speculation.page_views import PageViews
from tokenmill.types import Batch


class CapturedViews(PageViews):
    def __init__(self, model: LoadedModel, store: KVStore, layers: Sequence[int]) -> None:
        super().__init__(model, store, layers)
        self._dtype = torch.bfloat16 if model.table is None else model.table.dtype
        self._rotations = [_rotation(store.packed_pages(slot), self._dtype) for _, slot in self.group_slots]

    def attend_fn(self, batch: Batch) -> Attend:
        table, head_dim = self.rotary, self.specs[0].head_dim

        def attend(queries: Tensor) -> Tensor:
            dtype = queries.dtype
            queries = queries.to(self._dtype)
            rotated = gpu.rope(queries, batch.positions, table.cos, table.sin, head_dim, table.interleaved)
            attended = torch.empty_like(rotated)
            width = rotated.shape[1] // len(self.specs)
            for number in range(len(self.specs)):
                columns = slice(number * width, (number + 1) * width)
                self._attend(number, rotated[:, columns], attended[:, columns], batch)
            return attended.to(dtype)

        return attend

    def _attend(self, number: int, queries: Tensor, out: Tensor, batch: Batch) -> None:
        spec: AttentionSpec = self.specs[number]
        group, slot = self.group_slots[number]
        lengths = (batch.block_tables[group], batch.query_starts, batch.seq_lens)
        packed, rotation = self.store.packed_pages(slot), self._rotations[number]
        if packed is None:
            k_pages, v_pages = self.store.stored(slot)
            scales = self.store.scales(slot)
            gpu.paged_attention(
                queries, k_pages, v_pages, *lengths, spec.scale,
                max_query=1, max_seq=batch.max_seq, scales=scales, out=out,
            )  # fmt: skip
            return
        if rotation is not None:  # into the basis in which the keys are stored
            heads = queries.unflatten(1, (spec.num_kv_heads, -1, spec.head_dim))
            if packed.keys is not None:
                heads = (heads / packed.keys.scale[:, None]).to(queries.dtype)
            queries = (heads @ rotation).flatten(1)
        gpu.packed_attention(queries, packed, *lengths, spec.scale, max_query=1, max_seq=batch.max_seq, out=out)


def _rotation(pages: PackedPages | None, dtype: torch.dtype) -> Tensor | None:
    """[head_dim, head_dim], orthonormal; None where rows are stored unrotated."""
    if pages is None or pages.rows.turn is None:
        return None
    return (pages.rows.turn.float() / pages.rows.head_dim**0.5).to(dtype)
