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
        return tensor(self.model.decoder.forward(CudaOps(self.store, self.table, batch)))

    @torch.inference_mode()
    def logits(self, hidden: Tensor, batch: Batch, begin: int, end: int) -> Tensor:
        """Float32 logits of batch.logit_rows[begin:end]."""
        ops = CudaOps(self.store, self.table, batch, rows=batch.logit_rows[begin:end])
        logits: Tensor = self.model.decoder.logits(ops, hidden)
        return logits.float()
