"""Self-attention and the gated MLP: the two halves of every block, written once for all architectures."""

from __future__ import annotations

import torch

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.layers.rotary import RotaryTable
from tokenmill.model.ops import Ops, Value
from tokenmill.model.reader import WeightReader


class SelfAttention:
    """q, k, v -> (per-head norms) -> rope -> paged attention -> output projection."""

    def __init__(
        self, reader: WeightReader, description: ModelDescription, layer: int, rotary: RotaryTable | None
    ) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        d, a = description, description.layers[layer].attention
        query_width, kv_width = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        self.inputs = [
            reader.linear(f"{prefix}.q_proj", query_width, d.hidden_size, a.qkv_bias),
            reader.linear(f"{prefix}.k_proj", kv_width, d.hidden_size, a.qkv_bias),
            reader.linear(f"{prefix}.v_proj", kv_width, d.hidden_size, a.qkv_bias),
        ]
        # An error in a value reaches every later token: by measurement it matters more than errors of far larger
        # matrices.
        self.inputs[2].precise = True
        self.output = reader.linear(f"{prefix}.o_proj", d.hidden_size, query_width, a.output_bias)
        self.query_norm = self.key_norm = None
        if a.head_norms == "unit":
            # Llama 4 applies it after the rotation, which does not change the norm of a head.
            self.query_norm, self.key_norm = torch.ones(a.head_dim), torch.ones(a.head_dim)
        elif a.head_norms:
            self.query_norm = reader.vector(f"{prefix}.q_norm.weight", a.head_dim, d.norm_offset)
            self.key_norm = reader.vector(f"{prefix}.k_norm.weight", a.head_dim, d.norm_offset)
        self.rotary = rotary
        self.eps = d.norm_eps
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
        if self.query_norm is not None and self.key_norm is not None:
            q = ops.rms_norm(q, self.query_norm, self.eps, self.spec.head_dim)
            k = ops.rms_norm(k, self.key_norm, self.eps, self.spec.head_dim)
        if self.rotary is not None:
            q = ops.rope(q, self.rotary, self.spec.head_dim)
        if self.rotary is not None and self.rotary.rotates_keys:
            k = ops.rope(k, self.rotary, self.spec.head_dim)
        return ops.linear(ops.attention(q, k, v, self.spec), [self.output])[0]


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, reader: WeightReader, description: ModelDescription, layer: int) -> None:
        prefix = reader.first_prefix([f"model.layers.{layer}.mlp", f"model.layers.{layer}.feed_forward"])
        hidden, mlp = description.hidden_size, description.layers[layer].feed_forward
        assert mlp is not None
        assert mlp.gated
        self.inputs = [
            reader.linear(f"{prefix}.gate_proj", mlp.intermediate_size, hidden, mlp.bias),
            reader.linear(f"{prefix}.up_proj", mlp.intermediate_size, hidden, mlp.bias),
        ]
        self.output = reader.linear(f"{prefix}.down_proj", hidden, mlp.intermediate_size, mlp.bias)
        self.activation = mlp.activation

    def __call__(self, ops: Ops, x: Value) -> Value:
        gate, up = ops.linear(x, self.inputs)
        return ops.linear(ops.gated(gate, up, self.activation), [self.output])[0]
