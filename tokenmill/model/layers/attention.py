"""Self-attention and the gated MLP: the two halves of every block, written once for all architectures."""

from __future__ import annotations

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.layers.rotary import RotaryTable
from tokenmill.model.ops import Ops, Value
from tokenmill.model.reader import WeightReader


class SelfAttention:
    """q, k, v -> (per-head norms) -> rope -> paged attention -> output projection."""

    def __init__(
        self,
        reader: WeightReader,
        description: ModelDescription,
        layer: int,
        rotary: RotaryTable,
        head_norms: bool = False,
    ) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        d = description
        query_width, kv_width = d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
        self.inputs = [
            reader.linear(f"{prefix}.q_proj", query_width, d.hidden_size, d.qkv_bias),
            reader.linear(f"{prefix}.k_proj", kv_width, d.hidden_size, d.qkv_bias),
            reader.linear(f"{prefix}.v_proj", kv_width, d.hidden_size, d.qkv_bias),
        ]
        # An error in a value reaches every later token; measured, it outweighs those of far larger matrices.
        self.inputs[2].precise = True
        self.output = reader.linear(f"{prefix}.o_proj", d.hidden_size, query_width, d.output_bias)
        self.query_norm = self.key_norm = None
        if head_norms:
            self.query_norm = reader.vector(f"{prefix}.q_norm.weight", d.head_dim, d.norm_offset)
            self.key_norm = reader.vector(f"{prefix}.k_norm.weight", d.head_dim, d.norm_offset)
        self.rotary = rotary
        self.eps = d.norm_eps
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=d.num_heads,
            num_kv_heads=d.num_kv_heads,
            head_dim=d.head_dim,
            scale=d.query_scale if d.query_scale is not None else d.head_dim**-0.5,
            window=d.sliding_window if d.layer_kinds[layer] == "sliding" else 0,
            softcap=d.attention_softcap,
        )

    def __call__(self, ops: Ops, x: Value) -> Value:
        q, k, v = ops.linear(x, self.inputs)
        if self.query_norm is not None and self.key_norm is not None:
            q = ops.rms_norm(q, self.query_norm, self.eps, self.spec.head_dim)
            k = ops.rms_norm(k, self.key_norm, self.eps, self.spec.head_dim)
        q = ops.rope(q, self.rotary, self.spec.head_dim)
        k = ops.rope(k, self.rotary, self.spec.head_dim)
        return ops.linear(ops.attention(q, k, v, self.spec), [self.output])[0]


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, reader: WeightReader, description: ModelDescription, layer: int) -> None:
        prefix = f"model.layers.{layer}.mlp"
        d = description
        self.inputs = [
            reader.linear(f"{prefix}.gate_proj", d.intermediate_size, d.hidden_size, d.mlp_bias),
            reader.linear(f"{prefix}.up_proj", d.intermediate_size, d.hidden_size, d.mlp_bias),
        ]
        self.output = reader.linear(f"{prefix}.down_proj", d.hidden_size, d.intermediate_size, d.mlp_bias)
        self.activation = d.activation

    def __call__(self, ops: Ops, x: Value) -> Value:
        gate, up = ops.linear(x, self.inputs)
        return ops.linear(ops.gated(gate, up, self.activation), [self.output])[0]
