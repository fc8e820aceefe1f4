"""What executors on tensors, or on numpy arrays, share: a step as a Batch, a forward pass over it, logits of its rows.

A subclass computes hidden states and logits; it may override `step` with a faster path for some steps and use this one
for the rest. Knows nothing of drafters, queues or text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.config import ResolvedConfig
from tokenmill.kernels import cpu
from tokenmill.kernels.host import on_host
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.batch import build_batch
from tokenmill.runtime.executors.base import RegisteredExecutor, StepInput, StepOutput
from tokenmill.runtime.sampling.sampler import Sampler
from tokenmill.types import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from tokenmill.model.adapters import AdapterSite

_MAX_LOGIT_VALUES = 1 << 24  # logits computed at a time: 64 MiB, whatever the vocabulary


class BatchedExecutor(RegisteredExecutor[Any]):
    def __init__(self, model: LoadedModel, store: KVStore, config: ResolvedConfig) -> None:
        self.model, self.store, self.config = model, store, config
        self.sampler = self.make_sampler()
        self.max_logit_rows = max(1, _MAX_LOGIT_VALUES // model.decoder.description.vocab_size)

    def make_sampler(self) -> Sampler:
        return Sampler(self.model.device, self.model.kernels)

    def hold_adapters(self, num_slots: int, max_rank: int) -> None:
        from tokenmill.model.adapters import AdapterBank

        self.adapters = AdapterBank(self.model, num_slots, max_rank, self.make_site)

    def make_site(self, weights: Sequence[LinearWeight], num_slots: int, max_rank: int) -> AdapterSite:  # noqa: ARG002
        """Where adapters of the product with these weights are held."""
        from tokenmill.kernels.ref_adapters import RefSite

        return RefSite([(weight.out_features, weight.in_features) for weight in weights], self.model.device)

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, hidden] of the batch, before the final norm; its keys and values are stored."""

    @abstractmethod
    def logits(self, hidden: Tensor, batch: Batch, begin: int, end: int) -> Tensor:
        """Float32 logits of batch.logit_rows[begin:end]. `hidden` is what `forward` returned for this batch."""

    def step(self, work: StepInput) -> StepOutput[Tensor]:
        layout = self.store.layout
        places = self.store.states.places if layout.states else None
        batch = build_batch(work, layout.page_size, self.store.device, places)
        hidden = self.forward(batch)
        return StepOutput(
            logits=lambda begin, end: self.logits(hidden, batch, begin, end),
            hidden=lambda tokens: copied_rows(hidden, tokens),
        )

    def final_norm(self, hidden: Tensor) -> Tensor:
        norm = self.model.decoder.norm
        hidden = hidden[:, : self.model.decoder.description.hidden_size]  # without those of kept layers
        if on_host(self.model.device):
            states: Any = np.asarray(hidden, dtype=np.float32)  # a step that was observed brings tensors
            return norm.of_tensor(states)
        import torch

        with torch.inference_mode():
            return norm.of_tensor(hidden.float())

    def token_logits(self, states: Tensor, token_ids: Sequence[int], adapter_slot: int = 0) -> Tensor:
        if on_host(self.model.device):
            return self._host_logits(states, token_ids)
        import torch

        with torch.inference_mode():
            return self._token_logits(states, token_ids, adapter_slot)

    def _host_logits(self, states: Any, token_ids: Sequence[int]) -> Any:
        head, d, ids = self.model.decoder.head, self.model.decoder.description, list(token_ids)
        logits = (states * d.logit_scale) @ cpu.look_up(head, ids).T
        if head.bias is not None:
            logits = logits + head.bias[ids]
        return np.tanh(logits / d.logit_softcap) * d.logit_softcap if d.logit_softcap else logits

    def _token_logits(self, states: Tensor, token_ids: Sequence[int], adapter_slot: int) -> Tensor:
        import torch

        head, d, ids = self.model.decoder.head, self.model.decoder.description, list(token_ids)
        rows = torch.cat([head.dequantize(each, each + 1) for each in ids]).to(states.device, torch.float32)
        x = states.float() * d.logit_scale
        logits = x @ rows.T
        if head.bias is not None:
            logits = logits + head.bias[ids].to(logits)
        site = self.adapters.site([head]) if self.adapters is not None and adapter_slot else None
        if site is not None:
            whole = logits.new_zeros(len(x), head.out_features)
            whole[:, ids] = logits
            site.adapt(x, torch.full((len(x),), adapter_slot, dtype=torch.int32, device=x.device), [whole])
            logits = whole[:, ids]
        return torch.tanh(logits / d.logit_softcap) * d.logit_softcap if d.logit_softcap else logits


def copied_rows(hidden: Tensor, rows: Sequence[int]) -> Tensor:
    return hidden[list(rows)]  # picked by a list: a copy
