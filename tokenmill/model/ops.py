"""The operations a forward pass is made of: the only way architectures compute anything.

An architecture is written against this protocol and never touches a tensor itself, so that one description serves the
eager path (EagerOps: tensors through the op table), the recorded CPU program and graph capture alike. `Value` is a
float32 activation [tokens, width]; its representation is up to the implementation. The batch (ids, positions, page
tables) is bound to the Ops object, not passed through the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from tokenmill.model.attention.base import AttentionSpec
    from tokenmill.model.attention.latent import HeadProjections, LatentSpec
    from tokenmill.model.formats.base import LinearWeight
    from tokenmill.model.layers.rotary import RotaryTable

Value = Any


class Ops(Protocol):
    def embed(self, table: LinearWeight, scale: float) -> Value:
        """Rows of `table` for the batch's token ids, times `scale`."""
        ...

    def rms_norm(self, x: Value, weight: Tensor, eps: float, head_dim: int = 0) -> Value:
        """Root-mean-square norm over each row, or over each `head_dim` slice of it."""
        ...

    def add(self, x: Value, y: Value) -> Value: ...

    def add_rms_norm(self, x: Value, y: Value, weight: Tensor, eps: float) -> tuple[Value, Value]:
        """(x + y, rms_norm(x + y)): the residual stream and the next block's input in one pass."""
        ...

    def linear(self, x: Value, weights: Sequence[LinearWeight]) -> list[Value]:
        """x @ W^T (+ bias) for each weight; they share x, so an implementation quantizes it once."""
        ...

    def rope(self, x: Value, table: RotaryTable, head_dim: int) -> Value: ...

    def attention(self, q: Value, k: Value, v: Value, spec: AttentionSpec) -> Value:
        """Store k and v in the pages of `spec.layer`, then attend causally over them."""
        ...

    def latent_attention(
        self,
        q: Value,
        kv: Value,
        norm: Tensor,
        eps: float,
        rotary: RotaryTable,
        projections: HeadProjections,
        spec: LatentSpec,
    ) -> Value:
        """Norm the latent of `kv` [T, rank + rope_dim] and rotate its key, store the row in the pages of `spec.layer`,
        rotate the ends of the queries [T, heads * (nope_dim + rope_dim)], attend causally: [T, heads * value_dim]."""
        ...

    def gated(self, gate: Value, up: Value, activation: str) -> Value:
        """activation(gate) * up; activation is "silu" or "gelu_tanh"."""
        ...

    def select_rows(self, x: Value) -> Value:
        """Keep only the rows whose logits the step needs."""
        ...

    def softcap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap)."""
        ...
