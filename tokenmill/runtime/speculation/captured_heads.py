"""A draft head inside a captured decode step: 16-bit products and Triton kernels, nothing that waits for the host.

Drafts for every row of a step, as if its sampled token were accepted; which rows are is known later. Where the last
tokens occurred earlier in the sequence, what followed then replaces the head's draft (prompt lookup): it is right more
often, and longer at no cost. Guessed states are not scaled: whatever reads them normalizes them first. Used by the
graph executor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenmill.kernels import triton as gpu
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.executors.cuda.ops import FEW_ROWS
from tokenmill.runtime.executors.cuda.values import multiply
from tokenmill.runtime.speculation.captured_views import CapturedViews
from tokenmill.runtime.speculation.head_modules import STATE_EPS, Attend, EagleHead, MedusaHeads
from tokenmill.types import Batch

_LOOKUP_DEPTH = 7  # tokens of looked up drafts: with the last known token they fill the bucket of 8 rows


class CapturedHead:
    def __init__(self, head: MedusaHeads | EagleHead, model: LoadedModel, store: KVStore, depth: int) -> None:
        assert model.table is not None, "the model is not on a GPU"
        self._guessed = min(depth, head.depth)
        groups = [number for number, group in enumerate(store.layout.groups) if group.kind == "full"]
        # Its pages are the index of the token history; -1: all layers have sliding windows
        self._group = groups[0] if groups else -1
        self.depth = max(self._guessed, min(depth, _LOOKUP_DEPTH)) if groups else self._guessed
        size = store.layout.page_size
        self._tokens = torch.zeros(store.num_pages, size, dtype=torch.int32, device=model.device)
        self._table, decoder = model.table, model.decoder
        self._scale, self._norm, self._eps = (
            decoder.description.embedding_scale,
            decoder.norm.weight,
            decoder.description.norm_eps,
        )
        assert decoder.head.kernel is not None, "the head is always multiplied"
        self._output_head: Any = decoder.head.kernel.run
        self._ones = torch.ones(self._table.shape[1], device=model.device)
        self._views = CapturedViews(model, store, head.layers) if head.layers else None
        self._eagle = None if isinstance(head, MedusaHeads) else _Eagle(head, model.table.dtype)
        if isinstance(head, MedusaHeads):
            linears: list[Any] = list(head.heads)[: self._guessed]
            self._weight = torch.cat([linear.weight for linear in linears]).detach().to(self._table.dtype)
            self._bias = torch.cat([linear.bias for linear in linears]).detach().to(self._table.dtype)

    def note(self, batch: Batch) -> None:
        # Padding rows have slot -1, which is the last slot of all: a wrong token there can only spoil a draft.
        if self._group >= 0:
            self._tokens.view(-1)[batch.slots[self._group]] = batch.token_ids.to(torch.int32)

    def guess(self, hidden: Tensor, last: Tensor, batch: Batch) -> Tensor:
        """hidden [R, hidden], before the final norm, of the batch's rows; last int64 [R]: the token sampled there
        -> int64 [R, depth]."""
        guessed = self.by_head(hidden, last, batch)
        if self._group < 0:
            return guessed
        table = batch.block_tables[self._group]
        drafts: Tensor = gpu.look_up_drafts(self._tokens, table, batch.seq_lens, last, guessed, self.depth)
        return drafts

    def by_head(self, hidden: Tensor, last: Tensor, batch: Batch) -> Tensor:
        """int64 [R, depth of the head], without lookup."""
        if self._eagle is None:
            moved = torch.nn.functional.silu(torch.addmm(self._bias, hidden, self._weight.T))
            states = hidden[:, None] + moved.view(hidden.shape[0], self._guessed, -1)
            return self._best(states.flatten(0, 1)).view(-1, self._guessed)
        attend = None if self._views is None else self._views.attend_fn(batch)
        drafts = []
        for _ in range(self._guessed):
            inputs = gpu.draft_inputs(hidden, last, self._table, self._scale, STATE_EPS)
            hidden = self._eagle.forward(inputs, self._unit, attend)
            last = self._best(hidden)
            drafts.append(last)
        return torch.stack(drafts, 1)

    def _unit(self, x: Tensor) -> Tensor:
        y: Tensor = gpu.rms_norm(x, self._ones, STATE_EPS)
        return y

    def _best(self, states: Tensor) -> Tensor:
        normed = gpu.rms_norm(states, self._norm, self._eps)
        few = states.shape[0] <= FEW_ROWS
        ids: Tensor = gpu.argmax(multiply(self._output_head, normed, torch.float32 if few else self._table.dtype))
        return ids


class _Eagle:
    """EagleHead.forward without the scale of its result."""

    def __init__(self, head: EagleHead, dtype: torch.dtype) -> None:
        self._join, self._bias = head.join.weight.detach().to(dtype), head.join.bias.detach().to(dtype)
        self._gate_up = torch.cat([head.gate.weight, head.up.weight]).detach().to(dtype)
        self._down = head.down.weight.detach().to(dtype)
        self._width = head.gate.weight.shape[0]
        if head.layers:
            self._ask, self._take = head.ask.weight.detach().to(dtype), head.take.weight.detach().to(dtype)

    def forward(self, inputs: Tensor, unit: Any, attend: Attend | None) -> Tensor:
        x = torch.addmm(self._bias, inputs, self._join.T)
        if attend is not None:
            x = torch.addmm(x, attend(unit(x) @ self._ask.T), self._take.T)
        both = unit(x) @ self._gate_up.T
        inner = gpu.gated(both[:, : self._width], both[:, self._width :], "silu")
        return torch.addmm(x, inner, self._down.T)
