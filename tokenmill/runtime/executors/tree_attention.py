"""Attention of draft trees in plain torch: each token sees the known tokens and its own ancestors only. The reference.

The recorded program masks by ancestors in C++ (csrc/cpu/attention.cpp) and is tested against this. Used by eager.py.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from tokenmill.kernels.ref import softmax_with_sinks
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.kvstore.base import KVStore
from tokenmill.types import Batch


def attend_along_branches(
    q: Tensor, store: KVStore, slot: int, block_table: Tensor, batch: Batch, spec: AttentionSpec
) -> Tensor:
    """q [T, heads * head_dim] over the pages of layer slot `slot`; the batch's own keys and values are stored."""
    starts, lengths = batch.query_starts.tolist(), batch.seq_lens.tolist()
    assert batch.ancestors is not None
    parts = []
    for number, (begin, end) in enumerate(pairwise(starts)):
        bits = torch.arange(end - begin, device=q.device)
        tree = (batch.ancestors[begin:end, None] >> bits) & 1 > 0
        entries = block_table[number]
        kept = (entries >= 0).view(-1, 1, 1, 1)  # a page outside the window may never have been written
        keys, values = (
            each.float().where(kept, 0.0).transpose(0, 1).flatten(1, 2)[:, : lengths[number]]
            for each in store.read(slot, entries.clamp(min=0).long())
        )
        parts.append(_attend(q[begin:end], keys, values, batch.positions[begin:end], tree, spec))
    return torch.cat(parts)


def _attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, tree: Tensor, spec: AttentionSpec) -> Tensor:
    """q [n, heads * dim] of the step's own tokens over keys [kv_heads, length, dim], these last n among them."""
    n, length = q.shape[0], keys.shape[1]
    query = q.view(n, spec.num_kv_heads, -1, spec.head_dim)
    scores = torch.einsum("nkgd,ksd->kgns", query, keys) * spec.scale
    if spec.softcap:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    known = length - n
    visible = torch.cat([torch.ones(n, known, dtype=torch.bool, device=q.device), tree], dim=1)
    if spec.window:
        # Positions of keys count from the last known one, so that tokens dropped by a budget do not matter.
        own = positions - positions[0] + known
        at = torch.cat([torch.arange(known, device=q.device), own])
        visible &= at[None, :] > own[:, None] - spec.window
    if spec.chunk:
        at = torch.cat([torch.arange(known, device=q.device) + positions[0] - known, positions])
        visible &= at[None, :] >= (positions - positions % spec.chunk)[:, None]
    scores = scores.masked_fill(~visible, float("-inf"))
    weights = scores.softmax(-1) if spec.sinks is None else softmax_with_sinks(scores, spec.sinks)
    return torch.einsum("kgns,ksd->nkgd", weights, values).reshape(n, -1)
