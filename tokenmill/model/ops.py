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

    from tokenmill.kernels.routing import RoutingSpec
    from tokenmill.model.attention.base import AttentionSpec
    from tokenmill.model.attention.latent import HeadProjections, LatentSpec
    from tokenmill.model.formats.base import LinearWeight
    from tokenmill.model.formats.stacks import ExpertStacks
    from tokenmill.model.layers.rotary import RotaryTable
    from tokenmill.model.state.specs import ConvolutionSpec, ScanSpec

Value = Any


class Ops(Protocol):
    def embed(self, table: LinearWeight, scale: float) -> Value:
        """Rows of `table` for the batch's token ids, times `scale`."""
        ...

    def add_positions(self, x: Value, table: Tensor) -> Value:
        """x plus the row of `table` [positions, width] of each token's position."""
        ...

    def rms_norm(self, x: Value, weight: Tensor, eps: float, head_dim: int = 0) -> Value:
        """Root-mean-square norm over each row, or over each `head_dim` slice of it."""
        ...

    def layer_norm(self, x: Value, weight: Tensor, bias: Tensor | None, eps: float, head_dim: int = 0) -> Value:
        """Norm with the mean removed over each row, or over each `head_dim` slice of it; `weight` and `bias` are as
        long as a slice, or as a row (one for each head)."""
        ...

    def add(self, x: Value, y: Value) -> Value: ...

    def scale(self, x: Value, factor: float) -> Value: ...

    def add_rms_norm(self, x: Value, y: Value, weight: Tensor, eps: float) -> tuple[Value, Value]:
        """(x + y, rms_norm(x + y)): the residual stream and the next block's input in one pass."""
        ...

    def linear(self, x: Value, weights: Sequence[LinearWeight]) -> list[Value]:
        """x @ W^T (+ bias) for each weight; they share x, so an implementation quantizes it once."""
        ...

    def rope(self, x: Value, table: RotaryTable, head_dim: int) -> Value:
        """Rotate the first numbers of each head, as many as the table has columns for; the others stay."""
        ...

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
        """activation(gate) * up; activation is one of `description.ACTIVATIONS`."""
        ...

    def activate(self, x: Value, activation: str) -> Value:
        """activation(x), for MLPs without a gate."""
        ...

    def experts(self, x: Value, router: LinearWeight, stacks: ExpertStacks, routing: RoutingSpec) -> Value:
        """The weighted sum of what the experts of each token make of it; `router` scores them."""
        ...

    def gate_rows(self, x: Value, gate: Value) -> Value:
        """x * sigmoid(gate); gate has one number per token."""
        ...

    def split(self, x: Value, widths: Sequence[int], heads: int = 1) -> list[Value]:
        """Columns of x, one value for each width; with `heads`, x is that many slices, and each is split so."""
        ...

    def join(self, values: Sequence[Value]) -> Value:
        """Values side by side."""
        ...

    def convolve(self, x: Value, spec: ConvolutionSpec) -> Value:
        """silu of a causal convolution of each column, over the sequence's earlier inputs too, which are kept."""
        ...

    def scan(self, inputs: Sequence[Value], spec: ScanSpec) -> Value:
        """One output row for each input row, while the state of `spec.layer` goes from row to row of its sequence."""
        ...

    def gated_norm(
        self, x: Value, gate: Value, weight: Tensor, eps: float, norm_first: bool, gate_scale: float = 1.0
    ) -> Value:
        """RMS norm over groups of each row, times silu(gate_scale * gate), which comes after the norm or before it.
        `weight` is [groups, width], or [width] for groups that share it."""
        ...

    def select_rows(self, x: Value) -> Value:
        """Keep only the rows whose logits the step needs."""
        ...

    def softcap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap)."""
        ...
