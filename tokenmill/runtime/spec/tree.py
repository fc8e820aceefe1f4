"""Trees of drafts: several guesses for one position, checked in one step by attention that follows each branch.

A tree's tokens lie in storage one after the other; each sees the known tokens and its own ancestors only, at the
position its depth gives it. Afterwards the keys and values of the accepted branch are moved together. This is the
reference: plain torch on the eager executor, for stores of plain floats on the CPU; a fused kernel would be a second
file. Called by the runner in steps that only decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.runtime.batch import build_batch
from tokenmill.runtime.eager import EagerExecutor, EagerOps
from tokenmill.runtime.sampling.sampler import Sampler
from tokenmill.runtime.spec.base import Draft, Target
from tokenmill.runtime.spec.verify import Verdict, verify
from tokenmill.types import Batch, ScheduledTokens, StepPlan


class TreeSteps:
    def __init__(self, target: Target) -> None:
        store = target.store
        if target.model.where.type != "cpu" or store.is_coded:
            raise UserError(
                "trees of drafts are checked on the CPU and over KV pages of plain floats only",
                "use --speculate head:DIR, or --device cpu with --kv-cache-dtype auto",
            )
        self._executor = EagerExecutor(target.model, store, target.config)
        self._store = store

    @torch.inference_mode()
    def run(
        self, rows: list[ScheduledTokens], drafts: Sequence[Draft], sampler: Sampler
    ) -> tuple[list[Verdict], Tensor]:
        """Verdicts, and [rows, hidden]: the state after the token whose logits chose each row's last one."""
        batch = build_batch(StepPlan(rows), self._store.layout.page_size, self._store.where)
        places = [place for row, draft in zip(rows, drafts, strict=True) for place in _positions(row, draft)]
        batch = replace(batch, positions=torch.tensor(places))
        trees = [_visible(draft) for draft in drafts]
        hidden: Tensor = self._executor.model.decoder.forward(_TreeOps(self._executor, batch, trees))
        logits = self._executor.logits(hidden, batch, 0, int(batch.logit_rows.shape[0]))
        verdicts = verify(sampler, logits, [row.request for row in rows], drafts)
        starts = batch.query_starts.tolist()
        chosen = []
        for row, verdict, start in zip(rows, verdicts, starts, strict=False):
            path = verdict.path[: len(verdict.accepted)]
            self._gather(row, path)
            chosen.append(start + (1 + path[-1] if path else 0))
        return verdicts, hidden[chosen].clone()

    def _gather(self, row: ScheduledTokens, path: list[int]) -> None:
        """Move the keys and values of the accepted branch to the slots right after the known token."""
        if path == list(range(len(path))):
            return
        size, first = self._store.layout.page_size, row.start + 1 - row.num_dropped
        for table in row.block_tables:
            source = torch.tensor([divmod(first + node, size) for node in path])
            destination = torch.tensor([divmod(first + depth, size) for depth in range(len(path))])
            pages = torch.tensor(table)
            for slot in range(self._store.layout.layers_per_page):
                for values in self._store.pages(slot):
                    moved = values[pages[source[:, 0]], :, source[:, 1]]
                    values[pages[destination[:, 0]], :, destination[:, 1]] = moved


class _TreeOps(EagerOps):
    def __init__(self, executor: EagerExecutor, batch: Batch, trees: list[Tensor]) -> None:
        super().__init__(executor, batch)
        self._trees = trees  # per sequence [1 + nodes, 1 + nodes]: which of the step's tokens each may see

    def attention(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        executor, batch = self._executor, self._batch
        group, slot = executor.places[spec.layer]
        executor.store.write(slot, batch.slots[group], k, v)
        starts, lengths = batch.query_starts.tolist(), batch.seq_lens.tolist()
        parts = []
        for number, tree in enumerate(self._trees):
            begin, end = starts[number], starts[number + 1]
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


def _visible(draft: Draft) -> Tensor:
    size = 1 + len(draft.token_ids)
    visible = torch.eye(size, dtype=torch.bool)
    visible[:, 0] = True
    for node in range(size - 1):
        parent = draft.parent(node)
        if parent >= 0:
            visible[1 + node] |= visible[1 + parent]
    return visible
