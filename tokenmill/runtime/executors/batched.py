"""What executors on torch tensors share: a step as a Batch, a forward pass over it, logits of its rows.

A subclass computes hidden states and logits; it may override `step` with a faster path for some steps and use this one
for the rest. Knows nothing of drafters, queues or text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmill.config import ResolvedConfig
from tokenmill.kernels.ref_adapters import RefSite
from tokenmill.model.adapters import AdapterBank, AdapterSite
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.batch import build_batch
from tokenmill.runtime.executors.base import RegisteredExecutor, StepInput, StepOutput
from tokenmill.runtime.sampling.sampler import Sampler
from tokenmill.types import Batch

_MAX_LOGIT_VALUES = 1 << 24  # logits computed at a time: 64 MiB, whatever the vocabulary


class BatchedExecutor(RegisteredExecutor[Tensor]):
    def __init__(self, model: LoadedModel, store: KVStore, config: ResolvedConfig) -> None:
        self.model, self.store, self.config = model, store, config
        self.sampler = self.make_sampler()
        self.max_logit_rows = max(1, _MAX_LOGIT_VALUES // model.decoder.description.vocab_size)

    def make_sampler(self) -> Sampler:
        return Sampler(self.model.device, self.model.kernels)

    def hold_adapters(self, num_slots: int, max_rank: int) -> None:
        self.adapters = AdapterBank(self.model, num_slots, max_rank, self.make_site)

    def make_site(self, weights: Sequence[LinearWeight], num_slots: int, max_rank: int) -> AdapterSite:  # noqa: ARG002
        """Where adapters of the product with these weights are held."""
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

    @torch.inference_mode()
    def final_norm(self, hidden: Tensor) -> Tensor:
        return self.model.decoder.norm.of_tensor(hidden.float())

    @torch.inference_mode()
    def token_logits(self, states: Tensor, token_ids: Sequence[int]) -> Tensor:
        head, d = self.model.decoder.head, self.model.decoder.description
        rows = torch.cat([head.dequantize(each, each + 1) for each in token_ids]).to(states.device, torch.float32)
        logits = states.float() * d.logit_scale @ rows.T
        if head.bias is not None:
            logits = logits + head.bias[list(token_ids)].to(logits)
        return torch.tanh(logits / d.logit_softcap) * d.logit_softcap if d.logit_softcap else logits


def copied_rows(hidden: Tensor, rows: Sequence[int]) -> Tensor:
    return hidden[list(rows)].clone()
