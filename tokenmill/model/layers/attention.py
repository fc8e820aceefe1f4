"""Self-attention over paged keys and values: one half of a block, written once for all architectures."""

from __future__ import annotations

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.mixers import Attention
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.layers.norm import NoNorm, Norm, UnitNorm
from tokenmill.model.layers.rotary import RotaryTable
from tokenmill.model.ops import Ops, Value
from tokenmill.model.reader import WeightReader


class SelfAttention:
    """q, k, v -> (norms of q and k) -> (rope) -> paged attention -> (gate) -> output projection."""

    def __init__(
        self, reader: WeightReader, description: ModelDescription, layer: int, rotary: RotaryTable | None
    ) -> None:
        """`rotary`: None where the layer does not rotate."""
        prefix = f"model.layers.{layer}.self_attn"
        d, a = description, description.layers[layer].attention
        query_width, kv_width = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        self.inputs = [
            reader.linear(f"{prefix}.q_proj", query_width * (1 + a.output_gate), d.hidden_size, a.qkv_bias),
            reader.linear(f"{prefix}.k_proj", kv_width, d.hidden_size, a.qkv_bias),
            reader.linear(f"{prefix}.v_proj", kv_width, d.hidden_size, a.qkv_bias),
        ]
        # An error in a value reaches every later token: by measurement it matters more than errors of far larger
        # matrices.
        self.inputs[2].precise = True
        self.output = reader.linear(f"{prefix}.o_proj", d.hidden_size, query_width, a.output_bias)
        self.query_norm = _projection_norm(reader, d, f"{prefix}.q_norm", a, query_width)
        self.key_norm = _projection_norm(reader, d, f"{prefix}.k_norm", a, kv_width)
        self.rotary = rotary
        self.output_gate, self.output_scale = a.output_gate, a.output_scale
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=a.num_heads,
            num_kv_heads=a.num_kv_heads,
            head_dim=a.head_dim,
            scale=a.scale if a.scale is not None else a.head_dim**-0.5,
            window=a.window,
            softcap=a.softcap,
            chunk=a.chunk,
            sinks=reader.vector(f"{prefix}.sinks", a.num_heads) if a.sinks else None,
        )

    def __call__(self, ops: Ops, x: Value) -> Value:
        q, k, v = ops.linear(x, self.inputs)
        gate = None
        if self.output_gate:  # rows of each head: query, then gate
            q, gate = ops.split(q, (self.spec.head_dim,) * 2, self.spec.num_heads)
        q, k = self.query_norm(ops, q), self.key_norm(ops, k)
        if self.rotary is not None:
            q = ops.rope(q, self.rotary, self.spec.head_dim)
        if self.rotary is not None and self.rotary.rotates_keys:
            k = ops.rope(k, self.rotary, self.spec.head_dim)
        y = ops.attention(q, k, v, self.spec)
        if gate is not None:
            y = ops.gated(gate, y, "sigmoid")
        y = ops.linear(y, [self.output])[0]
        return y if self.output_scale == 1.0 else ops.scale(y, self.output_scale)


def _projection_norm(
    reader: WeightReader, description: ModelDescription, name: str, attention: Attention, width: int
) -> Norm | UnitNorm | NoNorm:
    """Of the queries or the keys: over each head, by one weight for all of them or one each, or over the whole row."""
    if not attention.head_norms:
        return NoNorm()
    if attention.head_norms == "unit":
        # Llama 4 applies it after the rotation, which does not change the norm of a head.
        return UnitNorm(reader, attention.head_dim, description.norm_eps)
    if attention.head_norms == "projection":
        return Norm(reader, description, name, width)
    if attention.head_norms == "heads":
        return Norm(reader, description, name, width, attention.head_dim, bias=False)
    return Norm(reader, description, name, attention.head_dim, attention.head_dim)
