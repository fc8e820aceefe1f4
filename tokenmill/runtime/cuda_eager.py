"""The reference executor on a GPU: one launch per fused op, nothing captured. The graph executor must agree with it.

Activations are bf16, sums float32 inside the kernels. Holds no state between steps except the model and the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenmill.config import EngineConfig
from tokenmill.kernels import triton as gpu
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.cuda_ops import CudaOps, tensor
from tokenmill.types import Batch

_LONG_PROMPT = 2048
_MOST_WIDENED = 1 << 16  # tokens: 256 MiB for an 8B model's layer


class CudaEagerExecutor:
    name = "cuda_eager"

    def __init__(self, model: LoadedModel, store: KVStore, config: EngineConfig) -> None:
        assert model.table is not None
        self.model, self.store, self.config = model, store, config
        self.table = model.table

    @classmethod
    def declines(cls, model: LoadedModel, _store: KVStore) -> str | None:
        reason = gpu.unavailable(model.where)
        if reason is None and model.table is None:
            reason = "the weights were made ready for the CPU"
        return reason

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, hidden] of the batch; its keys and values are stored."""
        tokens = batch.token_ids.shape[0]
        # Prompts of one length that fill the step, or the first chunk of a longer one: the library's attention is the
        # fastest there, and needs a plan for every length, which only such repay.
        length, prompts = batch.max_query, batch.seq_lens.shape[0]
        whole = length == batch.max_seq >= _LONG_PROMPT and tokens == prompts * length == self.config.batch_tokens
        distinct = () if whole else self._distinct(batch)
        ops = CudaOps(self.store, self.table, batch, whole_prompts=prompts if whole else 0, distinct=distinct)
        return tensor(self.model.decoder.forward(ops))

    def _distinct(self, batch: Batch) -> Sequence[Any]:
        """The pages of a step in which many tokens of prompts read many keys, if they are FP8: widened beforehand they
        are not widened again for every block of tokens."""
        tokens = batch.token_ids.shape[0]
        if min(tokens, batch.max_seq) < _LONG_PROMPT or batch.max_query == 1 or self.store.scales(0) is None:
            return ()
        found = [gpu.distinct_pages(table, self.store.layout.page_size) for table in batch.block_tables]
        return found if max(each.num_tokens for each in found) <= _MOST_WIDENED else ()

    @torch.inference_mode()
    def logits(self, hidden: Tensor, batch: Batch, begin: int, end: int) -> Tensor:
        """Float32 logits of batch.logit_rows[begin:end]."""
        ops = CudaOps(self.store, self.table, batch, rows=batch.logit_rows[begin:end])
        logits: Tensor = self.model.decoder.logits(ops, hidden)
        return logits.float()
