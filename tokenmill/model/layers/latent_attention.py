"""Latent attention as a layer (DeepSeek V2 and V3): low-rank projections around the op `latent_attention`."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.checkpoint.description import ModelDescription, RopeScaling
from tokenmill.checkpoint.mixers import LatentAttention
from tokenmill.model.attention.latent import HeadProjections, LatentSpec
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.layers.rotary import RotaryTable, yarn_growth
from tokenmill.model.ops import Ops, Value
from tokenmill.model.reader import WeightReader

_EPS = 1e-6  # of the norms inside the layer, whatever the model says of its others


class LatentSelfAttention:
    """queries (perhaps through a low rank) and one latent row per token -> latent attention -> output projection."""

    def __init__(self, reader: WeightReader, description: ModelDescription, layer: int, rotary: RotaryTable) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        d, (a,) = description, description.layers[layer].mixers
        assert isinstance(a, LatentAttention)
        self.query_norm, self.query_up = None, None
        queries = a.num_heads * (a.nope_dim + a.rope_dim)
        if a.query_rank:
            first = reader.linear(f"{prefix}.q_a_proj", a.query_rank, d.hidden_size, a.bias)
            self.query_norm = reader.vector(f"{prefix}.q_a_layernorm.weight", a.query_rank)
            self.query_up = reader.linear(f"{prefix}.q_b_proj", queries, a.query_rank)
        else:
            first = reader.linear(f"{prefix}.q_proj", queries, d.hidden_size)
        rows = reader.linear(f"{prefix}.kv_a_proj_with_mqa", a.kv_rank + a.rope_dim, d.hidden_size, a.bias)
        rows.precise = True  # an error in a row reaches every later token
        self.inputs = [first, rows]
        self.row_norm = reader.vector(f"{prefix}.kv_a_layernorm.weight", a.kv_rank)
        self.spec = LatentSpec(
            layer, a.num_heads, a.kv_rank, a.nope_dim, a.rope_dim, a.value_dim, _scale(a, d.rope_table(a.rope).scaling)
        )
        self.projections = HeadProjections(_stored_projections(reader, prefix, a), self.spec)
        self.output = reader.linear(f"{prefix}.o_proj", d.hidden_size, a.num_heads * a.value_dim, a.bias)
        self.rotary = replace(rotary, interleaved=a.interleaved)

    def __call__(self, ops: Ops, x: Value) -> Value:
        q, kv = ops.linear(x, self.inputs)
        if self.query_norm is not None and self.query_up is not None:
            (q,) = ops.linear(ops.rms_norm(q, self.query_norm, _EPS), [self.query_up])
        attended = ops.latent_attention(q, kv, self.row_norm, _EPS, self.rotary, self.projections, self.spec)
        return ops.linear(attended, [self.output])[0]


def _stored_projections(reader: WeightReader, prefix: str, a: LatentAttention) -> list[LinearWeight]:
    """One matrix (Hugging Face), or the two that newer GGUF files split it into."""
    if f"{prefix}.k_b_proj.weight" not in reader.checkpoint:
        return [reader.linear(f"{prefix}.kv_b_proj", a.num_heads * (a.nope_dim + a.value_dim), a.kv_rank)]
    return [
        reader.linear(f"{prefix}.k_b_proj", a.num_heads * a.kv_rank, a.nope_dim),
        reader.linear(f"{prefix}.v_b_proj", a.num_heads * a.value_dim, a.kv_rank),
    ]


def _scale(a: LatentAttention, scaling: RopeScaling) -> float:
    """YaRN makes scores larger by the square of its growth over all dimensions; that of cos and sin is another."""
    scale = float((a.nope_dim + a.rope_dim) ** -0.5)
    if scaling.kind != "yarn" or not scaling.mscale_all_dim:
        return scale
    return scale * yarn_growth(scaling, scaling.mscale_all_dim) ** 2
