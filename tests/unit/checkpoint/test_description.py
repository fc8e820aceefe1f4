"""Descriptions of families beyond those the engine runs: layers, features, matrices, against transformers' models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tokenmill.checkpoint.description import ModelDescription, Routing, differences
from tokenmill.checkpoint.hf_config import describe
from tokenmill.checkpoint.matrices import edge_matrices, layer_matrices
from tokenmill.checkpoint.mixers import Attention, LatentAttention, Recurrent

COMMON = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_DELTA = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 16, "attn_logit_softcapping": 5.0},
    "olmo2": {},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.25},
    "granite": {
        "embedding_multiplier": 12.0,
        "logits_scaling": 6.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.25,
    },
    "smollm3": {},
    "glm4": {"head_dim": 16},
    "starcoder2": {"sliding_window": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek_v3": {**_LATENT, "q_lora_rank": 24, "n_shared_experts": 1, "n_group": 4, "topk_group": 2},
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "n_shared_experts": 2},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "jamba": {
        "attn_layer_period": 4,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "qwen3_next": {**_DELTA, "layer_types": ["linear_attention", "full_attention"] * 2},
    "mamba2": {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1},
}
# Vectors of vectors that `matrices` leaves out on purpose.
_NOT_MATRICES = ("conv1d", "A_log", "shared_expert_gate", "q_norm", "k_norm", ".sinks", "_bias")


def _theirs(name: str) -> Any:
    return CONFIG_MAPPING[name](**{**COMMON, **CHANGES[name]})


def _ours(name: str) -> ModelDescription:
    return describe(_theirs(name).to_dict())


@pytest.mark.parametrize("name", CHANGES)
def test_matrices_are_those_of_the_real_model(name: str) -> None:
    """The numbers in all matrices together, to the last one."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_theirs(name))
    expected = sum(
        math.prod(parameter.shape)
        for label, parameter in model.named_parameters()
        if parameter.dim() > 1 and not any(part in label for part in _NOT_MATRICES)
    )
    description = _ours(name)
    counted = sum(matrix.parameters for matrix in edge_matrices(description))
    for layer in description.layers:
        counted += sum(matrix.parameters for matrix in layer_matrices(description.hidden_size, layer))
    assert counted == expected


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("llama", set()),
        ("gemma2", {"norms before and after each half"}),
        ("olmo2", {"norms after each half only", "norms over whole projections"}),
        ("cohere", {"parallel blocks", "LayerNorm", "scaled logits", "norms of each head"}),
        ("granite", {"scaled residual branches", "scaled logits"}),
        ("smollm3", {"layers without rotary embedding"}),
        ("glm4", {"norms before and after each half", "partial rotary embedding"}),
        ("starcoder2", {"LayerNorm", "MLPs without a gate"}),
        ("mixtral", {"experts"}),
        ("deepseek_v3", {"experts", "latent attention"}),
        ("gpt_oss", {"experts", "attention sinks"}),
        ("jamba", {"experts", "Mamba layers", "layers without rotary embedding"}),
        ("qwen3_next", {"experts", "gated delta rule layers", "gated attention output", "partial rotary embedding"}),
        ("mamba2", {"Mamba 2 layers", "layers without an MLP"}),
    ],
)
def test_features(name: str, features: set[str]) -> None:
    assert set(_ours(name).features()) == features


def test_mixed_layers() -> None:
    gemma = _ours("gemma2")
    assert gemma.layer_kinds == ("sliding", "full", "sliding", "full")
    assert (gemma.layers[0].attention.softcap, gemma.embedding_scale, gemma.norm_offset) == (5.0, 8.0, 1.0)
    assert [layer.attention.rope for layer in _ours("smollm3").layers] == ["full", "full", "full", ""]
    jamba = _ours("jamba")
    assert jamba.layer_kinds == ("recurrent", "full", "recurrent", "recurrent")
    assert [layer.feed_forward.num_experts for layer in jamba.layers if layer.feed_forward] == [0, 4, 0, 4]
    deepseek = _ours("deepseek_v3")
    (latent,) = deepseek.layers[1].mixers
    assert latent == LatentAttention(4, 24, 32, 16, 8, 24)
    assert deepseek.rope_table("full").rotary_dim == 8
    assert [layer.feed_forward.num_experts for layer in deepseek.layers if layer.feed_forward] == [0, 8, 8, 8]
    routing = deepseek.layers[1].feed_forward
    assert routing is not None
    assert routing.routing == Routing("sigmoid", scale=2.5, num_groups=4, top_groups=2, correction_bias=True)


def test_what_layers_keep() -> None:
    assert {(need.kind, need.head_dim, need.value_dim) for need in _ours("deepseek_v3").kv_layers()} == {
        ("latent", 40, 0)
    }
    delta, full = _ours("qwen3_next").kv_layers()[:2]
    assert (delta.kind, delta.state_bytes) == ("recurrent", (4 * 16 * 16 + 3 * (2 * 2 * 16 + 4 * 16)) * 4)
    assert (full.kind, full.num_kv_heads, full.head_dim) == ("full", 2, 32)
    (mixer,) = _ours("mamba2").layers[0].mixers
    assert isinstance(mixer, Recurrent)
    assert mixer.state_shape == (8, 16, 16)


def test_differences_name_the_innermost_field() -> None:
    ours = _ours("llama")
    assert differences(ours, ours) == []
    assert differences(ours, ours.with_attention(qkv_bias=True)) == ["qkv_bias"]
    assert isinstance(ours.layers[0].mixers[0], Attention)
