"""The measuring step of key_conditioning.py and head_samples.py by the ops of the GPU executors: the model as it will
run.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tokenmill.kernels import ref
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.layers.rotary import RotaryTable
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.executors.cuda.ops import CudaOps
from tokenmill.runtime.executors.cuda.values import Columns, tensor
from tokenmill.runtime.observation.heads import Add
from tokenmill.types import Batch


def measure_on_device(model: LoadedModel, store: KVStore, batch: Batch, add: Add) -> None:
    assert model.table is not None
    tensor(model.decoder.forward(_MeasuringOps(store, model.table, batch, add)))


class _MeasuringOps(CudaOps):
    """Ops that measure queries, keys and values on their way to attention."""

    def __init__(self, store: KVStore, table: Tensor, batch: Batch, add: Add) -> None:
        super().__init__(store, table, batch)
        self._add = add

    def attention(self, q: Any, k: Any, v: Any, spec: AttentionSpec) -> Tensor:
        (queries, q_table), (keys, k_table) = (_unrotated(each, spec.head_dim) for each in (q, k))
        values = tensor(v.plain if isinstance(v, Columns) else v).float()
        self._add(spec, queries, keys, values.reshape(len(values), spec.num_kv_heads, -1), (q_table, k_table))
        return super().attention(q, k, v, spec)


def _unrotated(side: Any, head_dim: int) -> tuple[Tensor, RotaryTable | None]:
    """float32 [T, heads, head_dim] with the norm of heads, before rotary positions, and the table of these."""
    columns = side if isinstance(side, Columns) else None
    rows = (tensor(side) if columns is None else columns.plain).float().contiguous()
    if columns is not None and columns.norm is not None:
        rows = ref.rms_norm(rows, columns.norm, columns.eps, head_dim)
    return rows.view(rows.shape[0], -1, head_dim), None if columns is None else columns.rotary
