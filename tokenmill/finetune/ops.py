"""The forward pass of a training step: model/ops.py on packed rows, with gradients by the activations and the adapters.

Frozen matrices stay in their stored format: each is expanded where it multiplies, once for the product and once for its
gradient, and never kept. Attention sees a token's own document only. Recurrent and latent layers are refused by
model.py before anything runs. Used by model.py only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tokenmill.finetune.data import Rows
from tokenmill.kernels import ref
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.layers.rotary import RotaryTable
from tokenmill.quantize.calibration_ops import CalibrationOps


class _FrozenProduct(torch.autograd.Function):
    """x @ W^T for a matrix that is not trained. The expanded matrix is made again for the gradient instead of kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
        ctx.weight, ctx.dtype = weight, dtype
        return (x.to(dtype) @ _expanded(weight, dtype).T).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return (gradient.to(ctx.dtype) @ _expanded(ctx.weight, ctx.dtype)).float(), None, None


def _expanded(weight: LinearWeight, dtype: torch.dtype) -> Tensor:
    return weight.dequantize(0, weight.out_features).to(dtype)


class LowRank:
    """The trained factors of one matrix."""

    def __init__(self, a: Tensor, b: Tensor, scale: float) -> None:
        self.a, self.b, self.scale = a, b, scale  # [rank, in], [out, rank]

    def __call__(self, x: Tensor) -> Tensor:
        return (x @ self.a.T) @ self.b.T * self.scale


class TrainingOps(CalibrationOps):
    """`names`: of each matrix, by identity. `factors`: of the matrices that are adapted, by name; empty: the base."""

    def __init__(
        self, names: Mapping[int, str], factors: Mapping[str, LowRank], rows: Rows, dtype: torch.dtype
    ) -> None:
        super().__init__(names, {}, int(rows.ids.shape[1]))
        self._factors = factors
        self._rows = rows
        self._dtype = dtype  # of large products
        self._mask = _document_mask(rows.documents)

    def embed(self, table: LinearWeight, scale: float) -> Tensor:
        return table.dequantize_rows(self._rows.ids.flatten()) * scale

    def add_positions(self, x: Tensor, table: Tensor) -> Tensor:
        return ref.add_positions(x, table, self._rows.positions.flatten())

    def select_rows(self, x: Tensor) -> Tensor:
        return x

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, head_dim: int = 0) -> Tensor:
        return ref.rms_norm(x, weight, eps, head_dim)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, head_dim: int = 0) -> Tensor:
        return ref.layer_norm(x, weight, bias, eps, head_dim)

    def linear(self, x: Tensor, weights: Sequence[LinearWeight]) -> list[Tensor]:
        return [self._linear(x, weight) for weight in weights]

    def _linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        y: Tensor = _FrozenProduct.apply(x, weight, self._dtype)
        if weight.bias is not None:
            y = y + weight.bias
        factors = self._factors.get(self._names[id(weight)])
        return y if factors is None else y + factors(x)

    def rope(self, x: Tensor, table: RotaryTable, head_dim: int) -> Tensor:
        positions = self._rows.positions.flatten()
        return ref.rope(x, positions, table.cos.to(x.device), table.sin.to(x.device), head_dim, table.interleaved)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        if self._mask is None:
            return super().attention(q, k, v, spec)
        length, repeats = self._length, spec.num_heads // spec.num_kv_heads

        def heads(x: Tensor, repeat: int) -> Tensor:  # -> [rows, heads, length, head_dim]
            split = x.view(-1, length, x.shape[1] // spec.head_dim, spec.head_dim).transpose(1, 2)
            return split.repeat_interleave(repeat, 1) if repeat > 1 else split

        query, key, value = heads(q, 1), heads(k, repeats), heads(v, repeats)
        visible = self._mask & _within(self._rows.positions, spec.window, spec.chunk)
        if spec.softcap or spec.sinks is not None:
            scores = (query @ key.transpose(-1, -2)) * spec.scale
            scores = ref.softcap(scores, spec.softcap) if spec.softcap else scores
            scores = scores.masked_fill(~visible, float("-inf"))
            if spec.sinks is not None:
                sinks = spec.sinks.to(q.device).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
                scores = torch.cat([scores, sinks], -1)
            mixed = scores.softmax(-1)[..., :length] @ value
        else:
            mixed = scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=spec.scale)
        return mixed.transpose(1, 2).reshape(q.shape)


def _document_mask(documents: Tensor) -> Tensor | None:
    """[rows, 1, query, key]: earlier tokens of the same document. None where every row is one whole document."""
    if bool((documents == documents[:, :1]).all()):
        return None
    length = documents.shape[1]
    order = torch.arange(length, device=documents.device)
    same = documents[:, :, None] == documents[:, None, :]
    return (same & (order[None, :] <= order[:, None])).unsqueeze(1)


def _within(positions: Tensor, window: int, chunk: int) -> Tensor:
    """[rows, 1, query, key] (or one that broadcasts to it): what a window or a chunk leaves visible."""
    query, key = positions[:, :, None], positions[:, None, :]
    visible = torch.ones(1, 1, 1, dtype=torch.bool, device=positions.device)
    if window:
        visible = visible & (key > query - window)
    if chunk:
        visible = visible & (key // chunk == query // chunk)
    return visible.unsqueeze(1)
