"""Trees of drafts: several guesses for one position, checked in one step by attention that follows each branch.

A tree's tokens lie in storage one after the other; each sees the known tokens and its own ancestors only, at the
position its depth gives it. Afterwards the rows of the accepted branch are moved together, byte by byte. The recorded
program masks by ancestors (csrc/cpu/attention.cpp); the eager executor runs the plain torch reference below. CPU only.
Called by the runner in steps that only decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.runtime.batch import build_batch
from tokenmill.runtime.executors.eager import EagerExecutor, EagerOps
from tokenmill.runtime.executors.recorded import RecordedExecutor
from tokenmill.runtime.sampling.sampler import Sampler
from tokenmill.runtime.speculation.base import Draft, Target
from tokenmill.runtime.speculation.verify import Verdict, verify
from tokenmill.types import Batch, ScheduledTokens, StepPlan

MAX_NODES = 63  # the ancestors of a token, the known one among them, are bits of one word


class TreeSteps:
    def __init__(self, target: Target) -> None:
        store = target.store
        recorded = isinstance(target.executor, RecordedExecutor)
        if target.model.device.type != "cpu" or (store.is_coded and not recorded):
            raise UserError(
                "trees of drafts are checked on the CPU, over quantized KV pages by C++ only",
                "use --speculate head:DIR, or --device cpu with --kv-cache-dtype auto",
            )
        self._recorded = target.executor if recorded else None
        self._eager = None if recorded else EagerExecutor(target.model, store, target.config)
        self._store = store

    @torch.inference_mode()
    def run(
        self, rows: list[ScheduledTokens], drafts: Sequence[Draft], sampler: Sampler
    ) -> tuple[list[Verdict], Tensor]:
        """Verdicts, and [rows, hidden]: the state after the token whose logits chose each row's last one."""
        batch = build_batch(StepPlan(rows), self._store.layout.page_size, self._store.device)
        places = [place for row, draft in zip(rows, drafts, strict=True) for place in _positions(row, draft)]
        masks = [mask for draft in drafts for mask in _ancestors(draft)]
        batch = replace(batch, positions=torch.tensor(places), ancestors=torch.tensor(masks))
        hidden, logits = self._compute(batch)
        verdicts = verify(sampler, logits, [row.request for row in rows], drafts)
        starts = batch.query_starts.tolist()
        chosen = []
        for row, verdict, start in zip(rows, verdicts, starts, strict=False):
            path = verdict.path[: len(verdict.accepted)]
            self._gather(row, path)
            chosen.append(start + (1 + path[-1] if path else 0))
        return verdicts, hidden[chosen].clone()

    def _compute(self, batch: Batch) -> tuple[Tensor, Tensor]:
        count = int(batch.logit_rows.shape[0])
        if self._recorded is not None:
            hidden = self._recorded.forward(batch)
            return hidden, self._recorded.logits(hidden, batch, 0, count)
        assert self._eager is not None
        hidden = self._eager.model.decoder.forward(_TreeOps(self._eager, batch))
        return hidden, self._eager.logits(hidden, batch, 0, count)

    def _gather(self, row: ScheduledTokens, path: list[int]) -> None:
        """Move the keys and values of the accepted branch to the slots right after the known token."""
        if path == list(range(len(path))):
            return
        size, first = self._store.layout.page_size, row.start + 1 - row.num_dropped
        source = torch.tensor([divmod(first + node, size) for node in path])
        destination = torch.tensor([divmod(first + depth, size) for depth in range(len(path))])
        for table in row.block_tables:
            pages = torch.tensor(table)
            for tensor in self._store.page_tensors():  # [layer slots, pages, kv_heads, page_size, row]
                moved = tensor[:, pages[source[:, 0]], :, source[:, 1]]
                tensor[:, pages[destination[:, 0]], :, destination[:, 1]] = moved


class _TreeOps(EagerOps):
    """Attention along branches in plain torch: the reference."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        executor, batch = self._executor, self._batch
        group, slot = executor.places[spec.layer]
        executor.store.write(slot, batch.slots[group], k, v)
        starts, lengths = batch.query_starts.tolist(), batch.seq_lens.tolist()
        assert batch.ancestors is not None
        parts = []
        for number, (begin, end) in enumerate(pairwise(starts)):
            tree = (batch.ancestors[begin:end, None] >> torch.arange(end - begin)) & 1 > 0
            pages = batch.block_tables[group][number].clamp(min=0).long()
            keys, values = (
                each.float().transpose(0, 1).flatten(1, 2)[:, : lengths[number]]
                for each in executor.store.read(slot, pages)
            )
            positions = batch.positions[begin:end]
            parts.append(_attend(q[begin:end], keys, values, positions, tree, spec))
        return torch.cat(parts)


def _attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, tree: Tensor, spec: AttentionSpec) -> Tensor:
    """q [n, heads * dim] of the step's own tokens over keys [kv_heads, length, dim], these last n among them."""
    n, length = q.shape[0], keys.shape[1]
    query = q.view(n, spec.num_kv_heads, -1, spec.head_dim)
    scores = torch.einsum("nkgd,ksd->kgns", query, keys) * spec.scale
    if spec.softcap:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    known = length - n
    visible = torch.cat([torch.ones(n, known, dtype=torch.bool), tree], dim=1)
    if spec.window:
        # Positions of keys count from the last known one, so that tokens dropped by a budget do not matter.
        own = positions - positions[0] + known
        at = torch.cat([torch.arange(known), own])
        visible &= at[None, :] > own[:, None] - spec.window
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("kgns,ksd->nkgd", weights, values).reshape(n, -1)


def _positions(row: ScheduledTokens, draft: Draft) -> list[int]:
    depths = draft.depths()
    return [row.start, *(row.start + 1 + depth for depth in depths)]


def _ancestors(draft: Draft) -> list[int]:
    """Of the known token and of each node: which of these it sees, as bits."""
    masks = [1]
    for node in range(len(draft.token_ids)):
        masks.append(masks[1 + draft.parent(node)] | 1 << (1 + node))
    return [mask - (1 << 64) if mask >> 63 else mask for mask in masks]  # as int64
