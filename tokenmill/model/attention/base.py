"""The contract of an attention backend, and what a call needs to know of its layer besides the batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from tokenmill.model.kvstore.base import KVStore
    from tokenmill.types import Batch


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies q.k
    window: int = 0  # 0: full; else a token sees itself and the window - 1 tokens before it
    softcap: float = 0.0  # 0: off
    chunk: int = 0  # a token sees the tokens of its own chunk of this length; 0: no chunks
    sinks: Tensor | None = None  # [heads] float32: logits that join the softmax and carry no value


class AttentionBackend(ABC):
    """Attends over the pages of a store. Takes what it can run and declines the rest with a reason."""

    name: str

    def __init__(self, store: KVStore, kernels: str = "") -> None:
        """`kernels`: forced backend of the op table, or empty."""
        self.store = store
        self.kernels = kernels

    @classmethod
    @abstractmethod
    def declines(cls, store: KVStore) -> str | None:
        """Why this backend cannot read this store; None if it can."""

    @abstractmethod
    def attend(self, q: Tensor, slot: int, block_table: Tensor, batch: Batch, spec: AttentionSpec) -> Tensor:
        """q [T, heads * head_dim] over the pages of layer slot `slot`; the batch's own k and v are stored already."""
