"""Experts in GGUF files: tensor names, and what their metadata and llama.cpp's code say of routing.

Names of tensors are those that the reader of experts knows (model/expert_reader.py): a tensor for all experts and each
projection. Which layers have experts is seen from their routers. Read by gguf_names.py and gguf_description.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tokenmill.checkpoint.description import FeedForward, LayerDescription, ModelDescription, Routing
from tokenmill.checkpoint.fields import Fields
from tokenmill.checkpoint.gguf_families import STORED_AS
from tokenmill.checkpoint.mixers import Attention

Shapes = Mapping[str, tuple[int, ...]]

LAYER_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Whole names, without the ending that other tensors have.
TENSOR_NAMES = {"attn_sinks.weight": "self_attn.sinks", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}

# What llama.cpp does where the metadata is silent.
_ROUTINGS = {
    "llama": Routing("softmax"),
    "qwen2moe": Routing("softmax", normalize=False),
    "qwen3moe": Routing("softmax"),
    "olmoe": Routing("softmax", normalize=False),
    "granitemoe": Routing("softmax"),
    "granitehybrid": Routing("softmax"),
    "jamba": Routing("softmax", normalize=False),
    "qwen3next": Routing("softmax"),
    "glm4moe": Routing("sigmoid", normalize=True),
    "deepseek2": Routing("softmax", normalize=False),
    "gpt-oss": Routing("softmax_of_selected"),
    "llama4": Routing("sigmoid", normalize=False, weights_on_input=True),
}
_SCORES = {1: "softmax", 2: "sigmoid", 3: "softmax_of_selected"}
_FIXED_NORMS = (
    "llama",
    "qwen2moe",
    "qwen3moe",
    "olmoe",
    "granitemoe",
    "granitehybrid",
    "jamba",
    "qwen3next",
    "gpt-oss",
)  # whatever `expert_weights_norm` says
_LLAMA4_CHUNK, _LLAMA4_TEMPERATURE, _LLAMA4_UNNORMED = 8192, (0.1, 8192.0), 128
_GPT_OSS_LIMIT = 7.0


def expert_values(d: ModelDescription) -> dict[str, int | float | bool]:
    """The metadata of a model with experts; nothing for others."""
    found = [ffn for layer in d.layers if (ffn := layer.feed_forward) is not None and ffn.num_experts]
    if not found:
        return {}
    ffn, routing = found[0], found[0].routing
    assert routing is not None
    values: dict[str, int | float | bool] = {
        "expert_count": ffn.num_experts,
        "expert_used_count": ffn.experts_per_token,
        "expert_feed_forward_length": ffn.expert_size,
    }
    if ffn.shared_size:
        values["expert_shared_feed_forward_length"] = ffn.shared_size
    if d.num_layers > len(found):
        leading = next(number for number, layer in enumerate(d.layers) if layer.feed_forward in found)
        values["leading_dense_block_count"] = leading
    name = STORED_AS.get(d.architecture, d.architecture)
    if name not in ("llama", "qwen2moe", "qwen3moe"):
        values["expert_weights_norm"] = routing.normalize
        values["expert_gating_func"] = {score: number for number, score in _SCORES.items()}[routing.score]
    if routing.scale != 1.0:
        values["expert_weights_scale"] = routing.scale
    if routing.num_groups > 1:
        values |= {"expert_group_count": routing.num_groups, "expert_group_used_count": routing.top_groups}
    if ffn.shared_size and not ffn.shared_gate:
        values["expert_shared_count"] = max(1, ffn.shared_size // ffn.expert_size)
    if name == "granitemoe":
        scale = d.layers[0].attention.scale
        values |= {"embedding_scale": d.embedding_scale, "residual_scale": d.residual_scale}
        values |= {"logit_scale": 1.0 / d.logit_scale}
        values |= {} if scale is None else {"attention.scale": scale}
    return values


def expert_shapes(d: ModelDescription) -> dict[str, tuple[int, ...]]:
    """Shapes that say what metadata does not, by canonical name: those that `describe` looks at."""
    shapes: dict[str, tuple[int, ...]] = {}
    for number, layer in enumerate(d.layers):
        ffn, prefix = layer.feed_forward, f"model.layers.{number}"
        if layer.mixers and isinstance(layer.mixers[0], Attention):
            attention = layer.attention
            width = attention.num_heads if attention.head_norms == "projection" else 1
            if attention.head_norms in ("head", "projection"):
                shapes[f"{prefix}.self_attn.q_norm.weight"] = (attention.head_dim * width,)
            if attention.sinks:
                shapes[f"{prefix}.self_attn.sinks"] = (attention.num_heads,)
        if ffn is None or not ffn.num_experts or ffn.routing is None:
            continue
        for name, present, shape in (
            ("gate.weight", True, (ffn.num_experts, d.hidden_size)),
            ("gate.bias", ffn.routing.bias, (ffn.num_experts,)),
            ("gate.e_score_correction_bias", ffn.routing.correction_bias, (ffn.num_experts,)),
            ("experts.down_proj.bias", ffn.bias, (ffn.num_experts, d.hidden_size)),
            ("shared_expert.up_proj.weight", ffn.shared_size > 0, (ffn.shared_size, d.hidden_size)),
            ("shared_expert_gate.weight", ffn.shared_gate, (d.hidden_size,)),
        ):
            if present:
                shapes[f"{prefix}.mlp.{name}"] = shape
    return shapes


def with_experts(description: ModelDescription, fields: Fields, shapes: Shapes, stored_as: str) -> ModelDescription:
    """The description of a file with `expert_count`, made from that of the same file without experts."""
    layers = tuple(_layer(layer, number, fields, shapes, stored_as) for number, layer in enumerate(description.layers))
    architecture = "mixtral" if stored_as == "llama" else description.architecture
    description = replace(description, architecture=architecture, layers=layers)
    if stored_as == "gpt-oss":  # trained so, and no key says it
        scaling = replace(description.rope_table("full").scaling, truncate=False)
        return description.with_rope_scaling("full", scaling)
    return description


def _layer(layer: LayerDescription, number: int, fields: Fields, shapes: Shapes, stored_as: str) -> LayerDescription:
    prefix = f"model.layers.{number}"
    mixers = tuple(
        _attention(mixer, f"{prefix}.self_attn.sinks" in shapes, fields, stored_as)
        if isinstance(mixer, Attention)
        else mixer
        for mixer in layer.mixers
    )
    dense = layer.feed_forward
    assert dense is not None
    has_experts = f"{prefix}.mlp.gate.weight" in shapes
    ffn = _experts(dense, prefix, fields, shapes, stored_as) if has_experts else dense
    return LayerDescription(mixers, ffn, layer.norms)


def _attention(attention: Attention, sinks: bool, fields: Fields, stored_as: str) -> Attention:
    """Llama 4's chunk and temperature are in llama.cpp's code only."""
    if stored_as != "llama4":
        return replace(attention, sinks=sinks)
    if not attention.rope:
        return replace(attention, temperature=_LLAMA4_TEMPERATURE)
    norms = "" if fields.integer("expert_count") == _LLAMA4_UNNORMED else "unit"
    return replace(attention, chunk=_LLAMA4_CHUNK, head_norms=norms)


def _experts(dense: FeedForward, prefix: str, fields: Fields, shapes: Shapes, stored_as: str) -> FeedForward:
    count, used = fields.integer("expert_count"), fields.integer("expert_used_count")
    groups = fields.integer("expert_group_count", 1, low=0) or 1
    top_groups = fields.integer("expert_group_used_count", 1, low=0) or 1
    if used > count:
        raise fields.error(f"'expert_used_count' is {used} of {count} experts")
    if count % groups or top_groups > groups or used > count // groups * top_groups:
        raise fields.error(
            f"{count} experts do not divide into 'expert_group_count' = {groups}, {top_groups} of them used"
        )
    names = ("mlp.shared_expert", "shared_mlp")  # the second: Granite's hybrids
    shared = max(shapes.get(f"{prefix}.{name}.up_proj.weight", (0,))[0] for name in names)
    return replace(
        dense,
        intermediate_size=0,
        bias=f"{prefix}.mlp.experts.down_proj.bias" in shapes,
        num_experts=count,
        experts_per_token=used,
        expert_size=fields.integer("expert_feed_forward_length", 0, low=0) or dense.intermediate_size,
        shared_size=shared,
        shared_gate=f"{prefix}.mlp.shared_expert_gate.weight" in shapes,
        clamp=_GPT_OSS_LIMIT if stored_as == "gpt-oss" else 0.0,
        routing=replace(
            _routing(fields, stored_as),
            num_groups=groups,
            top_groups=top_groups,
            correction_bias=f"{prefix}.mlp.gate.e_score_correction_bias" in shapes,
            bias=f"{prefix}.mlp.gate.bias" in shapes,
        ),
    )


def _routing(fields: Fields, stored_as: str) -> Routing:
    plain = _ROUTINGS[stored_as]
    number = fields.integer("expert_gating_func", 0, low=0)
    if number and number not in _SCORES:
        raise fields.error(f"the router {number} ('expert_gating_func') is not known", "known: 1, 2 and 3")
    normalize = plain.normalize
    if stored_as not in _FIXED_NORMS:
        normalize = fields.flag("expert_weights_norm", plain.normalize)
    score = _SCORES.get(number, plain.score)
    groups = fields.integer("expert_group_count", 1, low=0) > 1
    return replace(
        plain,
        score=score,
        group_score="max" if stored_as == "deepseek2" and score == "softmax" and groups else plain.group_score,
        normalize=normalize,
        scale=fields.number("expert_weights_scale", plain.scale) or 1.0,
    )
