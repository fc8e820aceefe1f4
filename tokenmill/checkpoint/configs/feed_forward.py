"""The feed-forward of each layer of a config.json: a dense MLP, or experts and how they are chosen."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.checkpoint.configs.families import Family
from tokenmill.checkpoint.description import FeedForward, Routing
from tokenmill.checkpoint.fields import Fields

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
}


def feed_forward(text: Fields, family: Family, hidden_size: int, layer: int) -> FeedForward | None:
    if not family.has_mlp:
        return None
    name = text.text(family.activation_key, family.activation)
    activation = "gelu_tanh" if name == "gelu" and family.tanh_gelu else _ACTIVATIONS.get(name, name)
    stated = text.flag(family.mlp_bias_key, family.bias and family.mlp_bias_key == family.bias_key)
    bias = stated if family.mlp_bias is None else family.mlp_bias
    dense = FeedForward(0, family.gated, activation, bias)
    experts = text.integer("num_experts", 0, low=0)
    if not experts or not _has_experts(text, layer):
        default = dict(family.sizes).get("intermediate_size", None if family.gated else 4 * hidden_size)
        key = "intermediate_size_mlp" if experts and text.raw("intermediate_size_mlp") else "intermediate_size"
        return replace(dense, intermediate_size=text.integer(key, default))
    size = text.integer("moe_intermediate_size", text.integer("intermediate_size", 0, low=0), low=0)
    shared = text.integer("shared_expert_intermediate_size", text.integer("shared_intermediate_size", 0, low=0), low=0)
    if not shared and text.raw("n_shared_experts"):
        shared = text.integer("n_shared_experts") * size
    return replace(
        dense,
        num_experts=experts,
        experts_per_token=text.integer("num_experts_per_tok"),
        expert_size=size,
        shared_size=shared,
        routing=_routing(text, family),
    )


def _routing(text: Fields, family: Family) -> Routing:
    plain = family.routing
    return replace(
        plain,
        normalize=text.flag("norm_topk_prob", plain.normalize),
        scale=text.number("routed_scaling_factor", plain.scale),
        num_groups=text.integer("n_group", 1),
        top_groups=text.integer("topk_group", 1),
    )


def _has_experts(text: Fields, layer: int) -> bool:
    if layer < text.integer("first_k_dense_replace", 0, low=0):
        return False
    if text.raw("expert_layer_period"):  # Jamba
        return layer % text.integer("expert_layer_period") == text.integer("expert_layer_offset", 0, low=0)
    if text.raw("moe_layers") is not None:  # Llama 4
        return layer in text.integers("moe_layers")
    step = text.integer("decoder_sparse_step", text.integer("interleave_moe_layer_step", 1))
    return (layer + 1) % step == 0 and layer not in text.integers("mlp_only_layers")
