"""config.json -> description, against transformers' own config classes and against hand-written variants."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from tokenmill.checkpoint.configs.families import FAMILIES
from tokenmill.checkpoint.description import ModelDescription, RopeScaling, RopeTable
from tokenmill.checkpoint.hf_config import describe
from tokenmill.errors import CheckpointError

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "vocab_size": 100,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
LLAMA3 = RopeScaling("llama3", 8.0, 512, low_freq_factor=1.0, high_freq_factor=4.0)


def config(model_type: str, **values: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SIZES, **values}


def assert_agrees(description: ModelDescription, theirs: Any) -> None:
    """Compare with a transformers config object."""
    assert description.hidden_size == theirs.hidden_size
    assert description.num_layers == theirs.num_hidden_layers
    assert (description.num_heads, description.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    own_head_dim = getattr(theirs, "head_dim", None)
    assert description.head_dim == (own_head_dim or theirs.hidden_size // theirs.num_attention_heads)
    assert description.vocab_size == theirs.vocab_size
    assert description.context_length == theirs.max_position_embeddings
    assert description.norm_eps == theirs.rms_norm_eps
    assert description.tie_embeddings == theirs.tie_word_embeddings
    assert description.bos_id == theirs.bos_token_id
    eos = theirs.eos_token_id
    assert description.eos_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))
    rope = theirs.rope_parameters
    assert description.rope_table("full").theta == (rope.get("full_attention") or rope)["rope_theta"]
    kinds = getattr(theirs, "layer_types", None)
    if kinds:
        assert [f"{kind}_attention" for kind in description.layer_kinds] == kinds
    if description.num_sliding_layers:
        assert description.sliding_window == theirs.sliding_window


@pytest.mark.parametrize("saved", [False, True], ids=["as written", "as saved by transformers"])
@pytest.mark.parametrize(
    "values",
    [
        config("llama"),
        config("llama", num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, rope_theta=5e5),
        config("llama", tie_word_embeddings=True, eos_token_id=[7, 9], rms_norm_eps=1e-5),
        config("mistral"),
        config("mistral", sliding_window=None, head_dim=32),
        config("qwen2", num_key_value_heads=4, rope_theta=1e6, bos_token_id=5, eos_token_id=6),
        config("qwen2", num_key_value_heads=4, use_sliding_window=True, sliding_window=64, max_window_layers=3),
        config("qwen3", num_key_value_heads=2, sliding_window=64),
        config("qwen3", num_key_value_heads=2, head_dim=16, layer_types=["full_attention"] * 8),
        {"model_type": "gemma3_text"},
        config("gemma3_text", sliding_window=128, sliding_window_pattern=3, rope_theta=2e6),
        config("gemma3_text", layer_types=["full_attention", "sliding_attention"] * 4),
    ],
)
def test_agrees_with_transformers(values: dict[str, Any], saved: bool) -> None:
    arguments = {key: value for key, value in values.items() if key != "model_type"}
    theirs = CONFIG_MAPPING[values["model_type"]](**arguments)
    assert_agrees(describe(theirs.to_dict() if saved else values), theirs)


def test_llama3_scaling_in_old_and_new_spelling() -> None:
    old = describe(config("llama", rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3_SCALING}))
    older = describe(config("llama", rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3_SCALING}))
    new = describe(config("llama", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_SCALING}))
    assert old == older == new
    assert new.rope_tables == (RopeTable("full", 8, 5e5, LLAMA3),)


def test_yarn_scaling() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16}
    result = describe(config("qwen2", num_key_value_heads=8, rope_scaling=scaling)).rope_table("full").scaling
    assert result == RopeScaling("yarn", 4.0, 1024, beta_fast=16.0)
    derived = describe(config("llama", max_position_embeddings=4096, rope_scaling={"type": "yarn", "factor": 2.0}))
    assert derived.rope_table("full").scaling.original_context == 4096
    explicit = describe(config("llama", rope_scaling={"type": "yarn", "factor": 2.0, "attention_factor": 1.5}))
    assert explicit.rope_table("full").scaling.attention_factor == 1.5


def test_gemma3_text() -> None:
    description = describe(config("gemma3_text", query_pre_attn_scalar=64, final_logit_softcapping=30.0))
    assert (description.architecture, description.activation) == ("gemma3", "gelu_tanh")
    assert (description.norm_offset, description.embedding_scale) == (1.0, 8.0)
    assert (description.layers[0].attention.scale, description.logit_softcap) == (0.125, 30.0)
    assert {table.name: table.theta for table in description.rope_tables} == {"full": 1e6, "sliding": 1e4}
    assert [layer.attention.rope for layer in description.layers[4:7]] == ["sliding", "full", "sliding"]


def test_gemma3_nested_rope_parameters() -> None:
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    description = describe(config("gemma3_text", rope_parameters=nested))
    full, sliding = description.rope_tables
    assert (full.theta, sliding.theta) == (3e6, 2e4)
    assert (full.scaling, sliding.scaling) == (RopeScaling("linear", 8.0), RopeScaling())
    old = {"rope_theta": 3e6, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert describe(config("gemma3_text", **old)) == description


def test_multimodal_gemma3_gives_its_text_model() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    description = describe({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    assert (description.hidden_size, description.num_heads, description.num_kv_heads) == (2560, 8, 4)
    assert (description.tie_embeddings, description.eos_ids) == (True, (1, 106))
    assert description.num_sliding_layers == 29


def test_a_wrapper_that_is_not_known_is_not_taken_for_its_text_model() -> None:
    description = describe({"model_type": "strange_vl", "text_config": config("llama"), "vision_config": {}})
    assert (description.architecture, description.model_type) == ("strange_vl", "strange_vl")
    assert description.hidden_size == 64


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_nonsense_is_an_error_that_says_so(model_type: str) -> None:
    """Any key with a value of the wrong kind: a description or a CheckpointError, nothing else."""
    good = {
        **config(model_type, num_key_value_heads=2, head_dim=16, max_position_embeddings=256),
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "state_size": 8,
    }
    keys = sorted({*good, *_KEYS} - {"model_type"})
    for key in keys:
        for value in (None, True, -1, 0, 1.5, float("inf"), "x", [], ["x"], [1], {}, {"a": []}, 10**12):
            with suppress(CheckpointError):
                describe({**good, key: value})


_KEYS = (
    "sliding_window", "sliding_window_pattern", "layer_types", "layers_block_type", "attn_layer_period",
    "attn_layer_indices", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_dim",
    "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim", "linear_num_value_heads", "mamba_d_state",
    "mamba_dt_rank", "n_groups", "moe_layers", "mlp_only_layers", "no_rope_layers", "hidden_act",
    "moe_intermediate_size", "n_shared_experts", "decoder_sparse_step", "norm_topk_prob", "text_config",
    "vision_config", "eos_token_id", "attention_bias", "query_pre_attn_scalar", "logit_scale", "logits_scaling",
    "tie_word_embeddings", "use_sliding_window",
)  # fmt: skip


def test_biases() -> None:
    llama = describe(config("llama", attention_bias=True, mlp_bias=True))
    assert _biases(llama) == (True, True, True)
    qwen2 = describe(config("qwen2", num_key_value_heads=8))
    assert _biases(qwen2) == (True, False, False)


def _biases(description: ModelDescription) -> tuple[bool, bool, bool]:
    layer = description.layers[-1]
    assert layer.feed_forward is not None
    return layer.attention.qkv_bias, layer.attention.output_bias, layer.feed_forward.bias


def test_end_ids_of_generation_config_come_first() -> None:
    description = describe(config("llama", eos_token_id=9), {"eos_token_id": [8, 9, 7], "bos_token_id": 3})
    assert description.eos_ids == (8, 9, 7)
    assert description.bos_id == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "mamba"}, "hidden_size"),
        ({}, "model_type"),
        ({"model_type": "llama"}, "hidden_size"),
        (config("llama", hidden_size=-1), "hidden_size"),
        (config("llama", hidden_size="64"), "hidden_size"),
        (config("llama", num_hidden_layers=10**9), "num_hidden_layers"),
        (config("llama", hidden_size=65), "multiple"),
        (config("llama", num_key_value_heads=3), "num_key_value_heads"),
        (config("llama", head_dim=15), "odd"),
        (config("llama", rope_theta=float("nan")), "rope_theta"),
        (config("phi3", rope_scaling={"type": "longrope", "short_factor": "x"}), "short_factor"),
        (config("llama", rope_scaling={"type": "linear"}), "factor"),
        (config("llama", rope_scaling=[1]), "rope_scaling"),
        (config("llama", eos_token_id="</s>"), "eos_token_id"),
        (config("qwen3", num_key_value_heads=8, layer_types=["full_attention"]), "layer_types"),
        (config("qwen3", num_key_value_heads=8, layer_types=["linear_attention"] * 8), "linear_attention"),
        (config("qwen3", num_key_value_heads=8, layer_types=["sliding_attention"] * 8), "sliding_window"),
        (config("llama", num_attention_heads=None), "num_attention_heads"),
        (config("mixtral", num_local_experts=4), "num_experts_per_tok"),
    ],
)
def test_bad_values_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        describe(values)
    assert caught.value.remedy
