"""A toy KV store in one file: every number is kept as a float32 with its sign turned, four bytes a value."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.kvstore.rows import RowFormat, RowStore


class TurnedRows(RowFormat):
    @property
    def row_bytes(self) -> int:
        return 4 * self.head_dim

    def to_rows(self, heads: Tensor) -> Tensor:
        return (-heads.float()).contiguous().view(torch.uint8)

    def from_rows(self, rows: Tensor) -> Tensor:
        return -rows.contiguous().view(torch.float32)


class ToyStore(RowStore):
    name = "toy"
    conditioned = False

    @classmethod
    def formats(cls, layout: KVLayout) -> tuple[RowFormat, RowFormat]:
        rows = TurnedRows(layout.head_dim)
        return rows, rows


def register() -> None:
    KV_STORES.register("toy", ToyStore)
