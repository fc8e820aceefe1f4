"""Norms: RMS or LayerNorm, with or without a bias, over rows or over heads; and their absence.

Which kind, and whether stored weights lack an offset, is in the model's description. Used by blocks and by attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.model.ops import Ops, Value
from tokenmill.model.reader import WeightReader

if TYPE_CHECKING:
    from torch import Tensor


class Norm:
    """The norm `name`, of `size` weights (0: the hidden size), over each `head_dim` numbers (0: over each row)."""

    def __init__(
        self,
        reader: WeightReader,
        description: ModelDescription,
        name: str,
        size: int = 0,
        head_dim: int = 0,
        bias: bool | None = None,
    ) -> None:
        """`bias`: None as the model's other norms."""
        d = description
        size = size or d.hidden_size
        self.removes_mean = d.norm == "layer"
        self.weight = reader.vector(f"{name}.weight", size, d.norm_offset)
        has_bias = d.norm_bias if bias is None else bias
        self.bias = reader.vector(f"{name}.bias", size) if has_bias else None
        self.eps, self.head_dim = d.norm_eps, head_dim

    def __call__(self, ops: Ops, x: Value) -> Value:
        if self.removes_mean:
            return ops.layer_norm(x, self.weight, self.bias, self.eps, self.head_dim)
        return ops.rms_norm(x, self.weight, self.eps, self.head_dim)

    def of_tensor(self, x: Tensor) -> Tensor:
        """The norm of float32 rows outside of a forward pass: by the torch spec, or in C++ where they are numpy's."""
        ops: Any
        if isinstance(x, np.ndarray):
            from tokenmill.kernels import cpu as ops
        else:
            from tokenmill.kernels import ref as ops
        normed: Tensor
        if self.removes_mean:
            normed = ops.layer_norm(x, self.weight, self.bias, self.eps, self.head_dim)
        else:
            normed = ops.rms_norm(x, self.weight, self.eps, self.head_dim)
        return normed

    def of_sum(self, ops: Ops, residual: Value, update: Value | None) -> tuple[Value, Value]:
        """(residual + update, its norm)."""
        if update is None:
            return residual, self(ops, residual)
        if self.removes_mean:
            total = ops.add(residual, update)
            return total, self(ops, total)
        return ops.add_rms_norm(residual, update, self.weight, self.eps)


class UnitNorm:
    """A root-mean-square norm of each head without weights."""

    def __init__(self, reader: WeightReader, head_dim: int, eps: float) -> None:
        ones = np.ones(head_dim, dtype=np.float32)
        self.weight, self.eps, self.head_dim = reader.own(ones), eps, head_dim

    def __call__(self, ops: Ops, x: Value) -> Value:
        return ops.rms_norm(x, self.weight, self.eps, self.head_dim)


class NoNorm:
    """In the place of a norm that a model does not have."""

    weight = bias = None

    def __call__(self, ops: Ops, x: Value) -> Value:
        del ops
        return x

    def of_sum(self, ops: Ops, residual: Value, update: Value | None) -> tuple[Value, Value]:
        total = residual if update is None else ops.add(residual, update)
        return total, total
