"""GPU kernels launched one by one, nothing captured: for long prompts, and for what cannot be captured.

Activations are bf16, sums float32 inside the kernels. A weight or KV store without a GPU kernel falls back to the torch
spec op by op. The graph executor must agree with it; the oracle of both is eager.py, which runs on a GPU too. Holds no
state between steps except the model and the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenmill.config import ResolvedConfig
from tokenmill.kernels import triton as gpu
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.executors.batched import BatchedExecutor
from tokenmill.runtime.executors.cuda.ops import CudaOps, tensor
from tokenmill.runtime.executors.cuda.sampling import CudaSampler
from tokenmill.runtime.sampling.sampler import Sampler
from tokenmill.types import Batch

_MANY_TOKENS, _MANY_KEYS = 2048, 256  # of a step with prompts, and of one of its sequences
_MAX_WIDENED = 1 << 16  # tokens: 256 MiB for an 8B model's layer


class CudaEagerExecutor(BatchedExecutor):
    name = "cuda_eager"

    def __init__(self, model: LoadedModel, store: KVStore, config: ResolvedConfig) -> None:
        super().__init__(model, store, config)
        assert model.table is not None
        self.table = model.table

    def make_sampler(self) -> Sampler:
        return CudaSampler(self.model.device, self.model.kernels)

    @classmethod
    def declines(cls, model: LoadedModel, _store: KVStore) -> str | None:
        reason = gpu.unavailable(model.device)
        if reason is None and model.table is None:
            reason = "the weights were made ready for the torch reference"
        return reason

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        self.store.prepare(batch)
        ops = CudaOps(self.store, self.table, batch, distinct=self._distinct(batch))
        return tensor(self.model.decoder.forward(ops))

    def _distinct(self, batch: Batch) -> Sequence[Any]:
        """The pages of a step in which many tokens of prompts read many keys, if they are FP8: widened beforehand they
        are not widened again for every block of tokens."""
        tokens = batch.token_ids.shape[0]
        few = tokens < _MANY_TOKENS or batch.max_seq < _MANY_KEYS or batch.max_query == 1
        if few or self.store.scales(0) is None:
            return ()
        size, starts = self.store.layout.page_size, batch.query_starts
        found = [gpu.distinct_pages(table, starts, size) for table in batch.block_tables]
        return found if max(each.num_tokens for each in found) <= _MAX_WIDENED else ()

    @torch.inference_mode()
    def logits(self, hidden: Tensor, batch: Batch, begin: int, end: int) -> Tensor:
        """Float32 logits of batch.logit_rows[begin:end]."""
        ops = CudaOps(self.store, self.table, batch, rows=batch.logit_rows[begin:end])
        logits: Tensor = self.model.decoder.logits(ops, hidden)
        return logits.float()
