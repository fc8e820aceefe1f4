"""GPU kernels launched one by one, without capture: for long prompts, and for models that cannot be captured.

Activations are bf16 or float16 (the type of the model's table), sums float32 inside the kernels. A weight or KV store
without a GPU kernel falls back to the torch spec op by op. The graph executor must agree with this one; the reference
for both is eager.py, which runs on a GPU too. Holds no state between steps except the model, the pages and drafts of
recurrent models that are not settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenmill.config import ResolvedConfig
from tokenmill.kernels import triton as gpu
from tokenmill.model.adapters import AdapterSite
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.executors.batched import BatchedExecutor
from tokenmill.runtime.executors.cuda.ops import CudaOps
from tokenmill.runtime.executors.cuda.sampling import CudaSampler
from tokenmill.runtime.executors.cuda.values import tensor
from tokenmill.runtime.executors.drafted_states import DraftedStates
from tokenmill.types import Batch

_MIN_TOKENS, _MIN_KEYS = 2048, 256  # of the step and of its longest sequence, for FP8 pages to be widened beforehand
_MAX_WIDENED = 1 << 16  # tokens: 256 MiB for a layer of an 8B model


class CudaEagerExecutor(BatchedExecutor):
    name = "cuda_eager"

    def __init__(self, model: LoadedModel, store: KVStore, config: ResolvedConfig) -> None:
        super().__init__(model, store, config)
        assert model.table is not None
        self.table = model.table
        self._drafted: DraftedStates | None = None  # of the step before, while its drafts are not settled

    def make_sampler(self) -> CudaSampler:
        return CudaSampler(self.model.device, self.model.kernels)

    def make_site(self, weights: Sequence[LinearWeight], num_slots: int, max_rank: int) -> AdapterSite:
        shapes = [(weight.out_features, weight.in_features) for weight in weights]
        has_bias = any(weight.bias is not None for weight in weights)
        site: AdapterSite = gpu.GpuSite(shapes, num_slots, max_rank, has_bias, self.model.device, self.table.dtype)
        return site

    @classmethod
    def declines(cls, model: LoadedModel, store: KVStore) -> str | None:  # noqa: ARG003
        reason = gpu.unavailable(model.device)
        if reason is None and model.table is None:
            reason = "the weights were prepared for the torch reference kernels"
        return reason

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        self.store.prepare(batch)
        self.begin_states(batch.begins)
        self._drafted = DraftedStates(batch) if batch.drafted else None
        expands = batch.token_ids.shape[0] >= _MIN_TOKENS and batch.max_query > 1
        distinct = self._distinct_pages(batch)
        ops = CudaOps(
            self.store, self.table, batch, distinct=distinct, expands=expands, drafted=self._drafted,
            adapters=self.adapters,
        )  # fmt: skip
        return tensor(self.model.decoder.forward(ops))

    def begin_states(self, slots: Sequence[int]) -> None:
        """Clear the recurrent states of sequences that begin."""
        if slots:
            self.store.states.clear(slots)

    @torch.inference_mode()
    def settle_drafts(self, kept: Sequence[int]) -> None:
        if self._drafted is not None:
            self._drafted.settle(kept)
            self._drafted = None

    def _distinct_pages(self, batch: Batch) -> Sequence[Any]:
        """By KV group, the FP8 pages that a step with long prompts reads: widened once, instead of again for
        every block of tokens. Empty where that does not pay."""
        tokens = batch.token_ids.shape[0]
        too_few = tokens < _MIN_TOKENS or batch.max_seq < _MIN_KEYS or batch.max_query == 1
        if too_few or self.store.scales(0) is None:
            return ()
        size, starts = self.store.layout.page_size, batch.query_starts
        pages = [gpu.distinct_pages(table, starts, size) for table in batch.block_tables]
        return pages if max(group.num_tokens for group in pages) <= _MAX_WIDENED else ()

    @torch.inference_mode()
    def logits(self, hidden: Tensor, batch: Batch, begin: int, end: int) -> Tensor:
        """Float32 logits of batch.logit_rows[begin:end]."""
        ops = CudaOps(self.store, self.table, batch, rows=batch.logit_rows[begin:end], adapters=self.adapters)
        logits: Tensor = self.model.decoder.logits(ops, hidden)
        return logits.float()
