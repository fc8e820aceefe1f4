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
_GREEDY = ("greedy", "group_limited_greedy")  # DeepSeek-V2's; they never renormalise
_SELECTIONS = (*_GREEDY, "noaux_tc")
_SWIGLU_ALPHA = 1.702  # of GPT-OSS


def feed_forward(text: Fields, family: Family, hidden_size: int, layer: int) -> FeedForward | None:
    if not family.has_mlp:
        return None
    name = text.text(family.activation_key, family.activation)
    activation = "gelu_tanh" if name == "gelu" and family.tanh_gelu else _ACTIVATIONS.get(name, name)
    stated = text.flag(family.mlp_bias_key, family.bias and family.mlp_bias_key == family.bias_key)
    bias = stated if family.mlp_bias is None else family.mlp_bias
    gate_scale, output_scale = text.numbers("mlp_multipliers", (1.0, 1.0))  # Falcon-H1
    dense = FeedForward(0, family.gated, activation, bias, gate_scale=gate_scale, output_scale=output_scale)
    experts = text.integer("num_experts", 0, low=0)
    if not experts or not _has_experts(text, layer):
        default = dict(family.sizes).get("intermediate_size", None if family.gated else 4 * hidden_size)
        key = "intermediate_size_mlp" if experts and text.raw("intermediate_size_mlp") else "intermediate_size"
        return replace(dense, intermediate_size=text.integer(family.dense_size_key or key, default))
    size = text.integer(family.expert_size_key, text.integer("intermediate_size", 0, low=0))
    shared = _shared_size(text, family, size)
    return replace(
        dense,
        num_experts=experts,
        experts_per_token=_experts_per_token(text, experts),
        expert_size=size,
        shared_size=shared,
        shared_gate=family.shared_gate and shared > 0,
        clamp=_clamp(text, family),
        routing=_routing(text, family, experts),
    )


def _shared_size(text: Fields, family: Family, expert_size: int) -> int:
    """Width of the experts that every token passes."""
    if family.routing.weights_on_input:  # Llama 4 has one, of the size of the others
        return expert_size
    shared = text.integer("shared_expert_intermediate_size", text.integer("shared_intermediate_size", 0, low=0), low=0)
    return shared or text.integer("n_shared_experts", 0, low=0) * expert_size


def _clamp(text: Fields, family: Family) -> float:
    if not family.clamp:
        return 0.0
    if text.number("swiglu_alpha", _SWIGLU_ALPHA) != _SWIGLU_ALPHA:
        raise text.wrong("swiglu_alpha", text.raw("swiglu_alpha"))
    return text.number("swiglu_limit", family.clamp, low=1e-6)


def _experts_per_token(text: Fields, experts: int) -> int:
    count = text.integer("num_experts_per_tok")
    if count > experts:
        raise text.error(f"'num_experts_per_tok' is {count} of {experts} experts")
    return count


def _routing(text: Fields, family: Family, experts: int) -> Routing:
    plain = family.routing
    selection, score = text.text("topk_method", ""), text.text("scoring_func", plain.score)
    if selection and selection not in _SELECTIONS:
        raise text.error(f"the router '{selection}' ('topk_method') is not known", f"known: {', '.join(_SELECTIONS)}")
    if score != plain.score:
        raise text.error(
            f"the router '{score}' ('scoring_func') is not known for this model type", f"known: {plain.score}"
        )
    groups, top_groups = text.integer("n_group", 1), text.integer("topk_group", 1)
    if selection == "greedy":
        groups = top_groups = 1
    if experts % groups or top_groups > groups:
        raise text.error(
            f"{experts} experts do not divide into 'n_group' = {groups} groups, 'topk_group' = {top_groups}"
        )
    if text.integer("num_experts_per_tok") > experts // groups * top_groups:
        raise text.error(f"'topk_group' = {top_groups} groups hold fewer experts than 'num_experts_per_tok'")
    return replace(
        plain,
        normalize=plain.normalize if selection in _GREEDY else text.flag("norm_topk_prob", plain.normalize),
        scale=text.number("routed_scaling_factor", plain.scale),
        num_groups=groups,
        top_groups=top_groups if groups > 1 else 1,
        group_score=plain.group_score if groups > 1 else Routing().group_score,
    )


def _has_experts(text: Fields, layer: int) -> bool:
    if layer < text.integer("first_k_dense_replace", 0, low=0):
        return False
    if text.raw("expert_layer_period"):  # Jamba
        offset = text.integer("expert_layer_offset", 0, low=0)
        return text.integer("num_experts") > 1 and layer % text.integer("expert_layer_period") == offset
    if text.raw("moe_layers") is not None:  # Llama 4
        return layer in text.integers("moe_layers")
    step = text.integer("decoder_sparse_step", text.integer("interleave_moe_layer_step", 1))
    return (layer + 1) % step == 0 and layer not in text.integers("mlp_only_layers")
