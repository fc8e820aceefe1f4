"""The reference executor on a GPU: one launch per fused op, nothing captured. The graph executor must agree with it.

Activations are bf16, sums float32 inside the kernels. Holds no state between steps except the model and the pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.config import EngineConfig
from tokenmill.kernels import triton as gpu
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.cuda_ops import CudaOps, tensor
from tokenmill.types import Batch

_LONG_PROMPT = 2048


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
        # A prompt as long as a step, or the first chunk of one: the library's attention is the fastest there, and needs
        # a plan for every length, which only this one repays.
        whole = tokens == batch.max_query == batch.max_seq == self.config.batch_tokens and tokens >= _LONG_PROMPT
        ops = CudaOps(self.store, self.table, batch, whole_prompt=whole)
        return tensor(self.model.decoder.forward(ops))

    @torch.inference_mode()
    def logits(self, hidden: Tensor, batch: Batch, begin: int, end: int) -> Tensor:
        """Float32 logits of batch.logit_rows[begin:end]."""
        ops = CudaOps(self.store, self.table, batch, rows=batch.logit_rows[begin:end])
        logits: Tensor = self.model.decoder.logits(ops, hidden)
        return logits.float()
