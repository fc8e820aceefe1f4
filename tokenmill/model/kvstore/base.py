"""The contract of a KV store: how the pages of the cache are held. One file per dtype family.

Pages are per layer slot (see hardware/kv_layout.py): layers of different groups that share a slot share its tensors,
because a page belongs to one group at a time. Knows nothing of requests or of who owns a page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from tokenmill.hardware.kv_layout import KVLayout


class KVStore(ABC):
    name: str

    def __init__(self, layout: KVLayout, num_pages: int, where: torch.device) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.where = where

    @classmethod
    @abstractmethod
    def page_bytes(cls, layout: KVLayout) -> int:
        """Bytes of one page over all its layers: what the memory model counts."""

    @abstractmethod
    def write(self, slot: int, token_slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store rows [T, kv_heads * head_dim] at `token_slots` (page * page_size + offset) of layer slot `slot`."""

    @abstractmethod
    def pages(self, slot: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer slot as float tensors [pages, kv_heads, page_size, head_dim]."""

    def stored(self, slot: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer slot as they lie in memory, for kernels that read them so."""
        return self.pages(slot)

    def scales(self, slot: int) -> tuple[Tensor, Tensor] | None:  # noqa: ARG002
        """What stored K and V are multiplied by, float32 [kv_heads] each; None where they are the values."""
        return None

    @abstractmethod
    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole pages (source, destination) in every layer: copy-on-write."""

    @property
    @abstractmethod
    def nbytes(self) -> int: ...
