"""Attention backends, tried in this order on the KV store. Add one: a file here and a line in the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.registry import Registry

if TYPE_CHECKING:
    from tokenmill.model.attention.base import AttentionBackend
    from tokenmill.model.kvstore.base import KVStore

ATTENTION_BACKENDS = Registry(
    "attention backend",
    {
        "coded": "tokenmill.model.attention.coded:CodedAttention",
        "paged": "tokenmill.model.attention.paged:PagedAttention",
    },
)


def choose_attention(store: KVStore, kernels: str = "") -> AttentionBackend:
    """The first backend that reads this store."""
    declined = []
    for name in ATTENTION_BACKENDS:
        backend = ATTENTION_BACKENDS.get(name)
        reason = backend.declines(store)
        if reason is None:
            chosen: AttentionBackend = backend(store, kernels)
            return chosen
        declined.append(f"{name}: {reason}")
    raise NotImplementedError(f"no attention backend reads {store.name} pages ({'; '.join(declined)})")
