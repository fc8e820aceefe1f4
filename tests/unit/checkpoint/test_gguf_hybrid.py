"""Hybrids in GGUF: names both ways, which layers recur, matrices in parts, and metadata that does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenmill.checkpoint import gguf_hybrid
from tokenmill.checkpoint.description import FeedForward, LayerDescription, ModelDescription
from tokenmill.checkpoint.gguf_description import describe
from tokenmill.checkpoint.gguf_metadata import Metadata
from tokenmill.checkpoint.gguf_names import canonical_name, gguf_name
from tokenmill.checkpoint.mixers import SCALED_PROJECTIONS, Attention, Recurrent
from tokenmill.errors import CheckpointError

_SIZES = {
    "block_count": 4,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 64,
    "ssm.state_size": 8,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
}


def _describe(stored_as: str, **changes: Any) -> ModelDescription:
    settings = {**_SIZES, **{key.replace("__", "."): value for key, value in changes.items()}}
    pairs = {f"{stored_as}.{key}": value for key, value in settings.items()}
    shapes = {f"layer {layer}": (1,) for layer in range(4)} | {"model.embed_tokens.weight": (50, 32)}
    metadata = Metadata(None, {"general.architecture": stored_as, **pairs})  # type: ignore[arg-type]
    return describe(metadata, shapes, "the file")


@pytest.mark.parametrize(
    ("architecture", "stored_as", "short", "name"),
    [
        ("jamba", "jamba", "blk.3.ffn_norm.weight", "model.layers.3.pre_ff_layernorm.weight"),
        ("jamba", "jamba", "blk.3.ssm_dt_norm.weight", "model.layers.3.mamba.dt_layernorm.weight"),
        ("jamba", "jamba", "blk.3.ssm_dt.bias", "model.layers.3.mamba.dt_proj.bias"),
        ("jamba", "jamba", "output_norm.weight", "model.final_layernorm.weight"),
        ("granitemoehybrid", "granitehybrid", "blk.0.ssm_dt.bias", "model.layers.0.mamba.dt_bias"),
        ("granitemoehybrid", "granitehybrid", "blk.0.ffn_gate.weight", "model.layers.0.shared_mlp.gate_proj.weight"),
        ("granitemoehybrid", "granitehybrid", "output_norm.weight", "model.norm.weight"),
        ("falcon_h1", "falcon-h1", "blk.1.ffn_norm", "model.layers.1.pre_ff_layernorm.weight"),
        ("falcon_h1", "falcon-h1", "blk.1.ssm_a", "model.layers.1.mamba.A"),
        ("qwen3_next", "qwen3next", "blk.1.attn_qkv.weight", "model.layers.1.linear_attn.in_proj_qkv.weight"),
        ("qwen3_next", "qwen3next", "blk.1.attn_gate.weight", "model.layers.1.linear_attn.in_proj_z.weight"),
        (
            "qwen3_next",
            "qwen3next",
            "blk.1.post_attention_norm.weight",
            "model.layers.1.post_attention_layernorm.weight",
        ),
    ],
)
def test_names(architecture: str, stored_as: str, short: str, name: str) -> None:
    assert canonical_name(stored_as, short) == name
    assert gguf_name(architecture, name) == short


def test_the_mlp_beside_experts_has_the_name_of_a_shared_one() -> None:
    names = (gguf_hybrid.ROUTER,)
    short, name = "blk.0.ffn_up_shexp.weight", "model.layers.0.shared_mlp.up_proj.weight"
    assert canonical_name("granitehybrid", short, names) == name
    assert gguf_name("granitemoehybrid", name, names) == short


def test_which_layers_recur() -> None:
    jamba = _describe("jamba", attention__head_count_kv=[0, 2, 0, 0])
    assert jamba.layer_kinds == ("recurrent", "full", "recurrent", "recurrent")
    assert (jamba.num_kv_heads, jamba.positions, jamba.rope_tables) == (2, "none", ())
    granite = _describe("granitehybrid", attention__head_count_kv=[2, 0, 0, 2], rope__scaling__finetuned=False)
    assert granite.layer_kinds == ("full", "recurrent", "recurrent", "full")
    assert granite.positions == "none"
    assert _describe("granitehybrid", attention__head_count_kv=[2, 0, 0, 2]).positions == "rope"
    both = _describe("falcon-h1", attention__head_count_kv=2)
    assert [[mixer.kind for mixer in layer.mixers] for layer in both.layers] == [["full", "recurrent"]] * 4
    listed = _describe("qwen3next", attention__head_count_kv=2, attention__recurrent_layers=[True, False, True, True])
    assert listed.layer_kinds == ("recurrent", "full", "recurrent", "recurrent")
    assert _describe("qwen3next", attention__head_count_kv=2, full_attention_interval=2).layer_kinds == (
        *("recurrent", "full"),
        *("recurrent", "full"),
    )


@pytest.mark.parametrize(
    ("stored_as", "changes", "words"),
    [
        ("jamba", {"attention__head_count_kv": [0, 2, 0]}, "'attention.head_count_kv' has 3 entries for 4 layers"),
        ("jamba", {"attention__head_count_kv": [0, 2, 0, 4]}, "'attention.head_count_kv' must be one number"),
        ("jamba", {"attention__head_count_kv": [0, 0, 0, 0]}, "'attention.head_count_kv' must be one number"),
        ("jamba", {"attention__head_count_kv": [0, 2, 0, 0], "ssm__inner_size": 32}, "twice the hidden size"),
        ("granitehybrid", {"attention__head_count_kv": [0, 2, 0, 0], "ssm__group_count": 3}, "do not divide"),
        (
            "qwen3next",
            {"attention__head_count_kv": 2, "attention__recurrent_layers": [True]},
            "'attention.recurrent_layers' has 1 entries for 4 layers",
        ),
    ],
)
def test_metadata_that_does_not_fit(stored_as: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        _describe(stored_as, **changes)
    assert words in str(caught.value)


def _model(architecture: str, *mixers: Attention | Recurrent, **changes: Any) -> ModelDescription:
    layer = LayerDescription(mixers, FeedForward(8, gate_scale=0.5, output_scale=0.25))
    return ModelDescription(architecture, 16, (layer,), 50, 64, **changes)


def test_a_joined_matrix_falls_into_all_of_its_rows() -> None:
    mixer = Recurrent("delta", 4, num_heads=4, num_key_heads=2, key_dim=3, value_dim=3)
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    rows = 2 * 2 * 3 + 2 * 4 * 3
    (qkv, cut), (z, rest) = gguf_hybrid.parts(name, (rows, 16), _model("qwen3_next", mixer))
    assert (qkv[-18:], z[-16:]) == ("in_proj_qkv.weight", "in_proj_z.weight")
    # Of each of two key heads: q 3, k 3, v 6, z 6.
    assert cut == ((0, 3), (18, 21), (3, 6), (21, 24), (6, 12), (24, 30))
    assert rest == ((12, 18), (30, 36))
    assert gguf_hybrid.parts("model.layers.0.self_attn.q_proj.weight", (16, 16), _model("qwen3_next", mixer)) == []


def test_multipliers_become_a_part_of_the_weights() -> None:
    attention = Attention(2, 1, 4, 4, rope="", scale=2.0, output_scale=3.0)
    multipliers = (1.0, 2.0, 3.0, 4.0, 5.0)
    mixer = Recurrent("mamba2", 4, 4, 2, num_heads=2, num_groups=1, multipliers=multipliers, output_scale=6.0)
    d = _model("falcon_h1", attention, mixer, embedding_scale=7.0, logit_scale=8.0)
    assert SCALED_PROJECTIONS in d.features()
    plain = gguf_hybrid.without_multipliers(d)
    assert not {SCALED_PROJECTIONS, "scaled logits"} & set(plain.features())
    assert (plain.layers[0].attention.scale, plain.embedding_scale) == (None, 1.0)

    def factors(name: str, count: int, begin: int = 0) -> list[float]:
        found: list[float] = gguf_hybrid.multiplied(name, torch.ones(count, 2), begin, d)[:, 0].tolist()
        return found

    layer = "model.layers.0."
    in_proj = [1.0] * 4 + [2.0] * 4 + [3.0] * 2 + [4.0] * 2 + [5.0] * 2
    assert factors(f"{layer}mamba.in_proj.weight", 14) == in_proj
    assert factors(f"{layer}mamba.in_proj.weight", 5, 6) == in_proj[6:11]
    assert factors(f"{layer}mamba.out_proj.weight", 2) == [6.0] * 2
    assert factors(f"{layer}self_attn.q_proj.weight", 2) == [4.0] * 2  # 2.0 instead of 4 ** -0.5
    assert factors(f"{layer}self_attn.k_proj.weight", 2) == [1.0] * 2
    assert factors(f"{layer}feed_forward.gate_proj.weight", 2) == [0.5] * 2
    assert factors("model.embed_tokens.weight", 2) == [7.0] * 2
    assert factors("lm_head.weight", 2) == [8.0] * 2
