"""Latent attention in GGUF (architecture `deepseek2`): its metadata both ways, and how its projections by head lie.

Files hold the projections by head as two stacks, of the keys transposed [heads, rank, nope_dim] and of the values
[heads, value_dim, rank]; older ones as one matrix like Hugging Face's. Rotated numbers lie in pairs in both. Used by
gguf_description.py, gguf_export.py and gguf.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.fields import Fields
from tokenmill.checkpoint.gguf_writer import Value
from tokenmill.checkpoint.mixers import LatentAttention

if TYPE_CHECKING:
    from torch import Tensor

_SIGMOID = 2  # of `expert_gating_func`
# For this architecture files have a tenth of `mscale_all_dim` in `yarn_log_multiplier`.
_LOG_MULTIPLIER = 0.1
LAYER_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_JOINED = ".self_attn.kv_b_proj.weight"
_STACKS = (".self_attn.k_b_proj.weight", ".self_attn.v_b_proj.weight")


def architecture_of(fields: Fields) -> str:
    """Files from before DeepSeek-V3 do not name the router's function."""
    return "deepseek_v3" if fields.integer("expert_gating_func", 0, low=0) == _SIGMOID else "deepseek_v2"


def read_mixer(fields: Fields) -> LatentAttention:
    rank, rope_dim = fields.integer("attention.kv_lora_rank"), fields.integer("rope.dimension_count")
    # Without the keys of the expanded heads, these are the plain ones: older files.
    head = fields.integer("attention.key_length_mla", fields.integer("attention.key_length"))
    if head <= rope_dim:
        raise fields.error(f"'rope.dimension_count' is {rope_dim}, heads have {head} numbers ('attention.key_length')")
    return LatentAttention(
        fields.integer("attention.head_count"),
        query_rank=fields.integer("attention.q_lora_rank", 0, low=0),
        kv_rank=rank,
        nope_dim=head - rope_dim,
        rope_dim=rope_dim,
        value_dim=fields.integer("attention.value_length_mla", fields.integer("attention.value_length")),
    )


def read_mscale(fields: Fields) -> float:
    """YaRN's `mscale` and `mscale_all_dim`: in llama.cpp they are one number, so that cos and sin are not scaled."""
    return fields.number("rope.scaling.yarn_log_multiplier", 0.0) / _LOG_MULTIPLIER


def values(d: ModelDescription) -> dict[str, Value]:
    """The keys of the file beyond those that all architectures have."""
    (a,) = d.layers[0].mixers
    assert isinstance(a, LatentAttention)
    found: dict[str, Value] = {
        "vocab_size": d.vocab_size,
        "leading_dense_block_count": _num_leading_dense(d),
        "expert_gating_func": _SIGMOID if d.architecture == "deepseek_v3" else 1,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": a.query_rank,  # 0 too: llama.cpp does without the key for a few sizes only
        "attention.kv_lora_rank": a.kv_rank,
        "attention.key_length": a.kv_rank + a.rope_dim,
        "attention.value_length": a.kv_rank,
        "attention.key_length_mla": a.nope_dim + a.rope_dim,
        "attention.value_length_mla": a.value_dim,
        "rope.dimension_count": a.rope_dim,
    }
    scaling = d.rope_table(a.rope).scaling
    if scaling.kind == "yarn" and scaling.mscale_all_dim:
        found["rope.scaling.yarn_log_multiplier"] = _LOG_MULTIPLIER * scaling.mscale_all_dim
    return found


def _num_leading_dense(d: ModelDescription) -> int:
    numbers = (number for number, layer in enumerate(d.layers) if layer.feed_forward and layer.feed_forward.num_experts)
    return next(numbers, d.num_layers)


def is_joined(name: str) -> bool:
    """Whether a tensor, by its canonical name, is the one matrix of projections by head of Hugging Face."""
    return name.endswith(_JOINED)


def exported(name: str, d: ModelDescription) -> list[tuple[str, tuple[int, ...]]]:
    """(canonical name, shape) of the stacks that a matrix of projections becomes; empty for other tensors."""
    (a, *_) = d.layers[0].mixers
    if not isinstance(a, LatentAttention):
        return []
    shapes = ((a.num_heads, a.kv_rank, a.nope_dim), (a.num_heads, a.value_dim, a.kv_rank))
    if is_joined(name):
        return [(name.removesuffix(_JOINED) + suffix, shape) for suffix, shape in zip(_STACKS, shapes, strict=True)]
    return [(name, shape) for suffix, shape in zip(_STACKS, shapes, strict=True) if name.endswith(suffix)]


def stack(name: str, matrix: Tensor, d: ModelDescription) -> Tensor:
    """The rows of one of the stacks (by its name in the file) from Hugging Face's matrix of projections."""
    (a, *_) = d.layers[0].mixers
    assert isinstance(a, LatentAttention)
    heads = matrix.view(a.num_heads, -1, a.kv_rank)
    if "attn_k_b" in name:
        return heads[:, : a.nope_dim].transpose(1, 2).reshape(-1, a.nope_dim)
    return heads[:, a.nope_dim :].reshape(-1, a.kv_rank)


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a tensor by its canonical name: the stacks of projections as one matrix of all heads' rows."""
    if name.endswith(_STACKS) and len(shape) == 3:
        return shape[0] * shape[1], shape[2]
    return shape
