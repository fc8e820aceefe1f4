"""Tensor names of Hugging Face files that are not the canonical ones, by architecture, and how those tensors lie.

Canonical are Llama's names, with Gemma's for norms behind a half, `self_attn.qkv_proj` and `mlp.gate_up_proj` for fused
matrices (tensor_views.py cuts them) and `up_proj`, `down_proj` for MLPs without a gate. Facts only; read by
safetensors.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_MLP_4H = {"mlp.dense_h_to_4h": "mlp.up_proj", "mlp.dense_4h_to_h": "mlp.down_proj"}
_CANONICAL_LAYERS = "model.layers."
_LAYER = re.compile(r"(\d{1,6})\.(.+)\.(\w+)")
_HEAD_NORM = re.compile(r"(self_attn\.[qk]_norm)\.norms\.(\d{1,6})")


@dataclass(frozen=True, slots=True)
class Naming:
    prefix: str = "model."  # of all but the head; some files leave it out
    layer_prefix: str = "layers."
    top: dict[str, str] = field(default_factory=dict)  # module outside the layers -> canonical module
    layers: dict[str, str] = field(default_factory=dict)  # module of a layer -> canonical module
    grouped_qkv: bool = False  # rows of the fused matrix lie by KV head
    transposed: tuple[str, ...] = ()  # canonical modules stored [in, out]
    buffers: tuple[str, ...] = ()  # endings of tensors that are computed, not read


_PLAIN = Naming()
_MAMBA = Naming(
    "backbone.",
    top={"embeddings": "model.embed_tokens", "norm_f": "model.norm"},
    layers={"norm": "input_layernorm"},
)
NAMINGS: dict[str, Naming] = {
    "starcoder2": Naming(layers={"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}),
    "glm4": Naming(
        layers={
            "post_self_attn_layernorm": "post_attention_layernorm",
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        }
    ),
    "stablelm": Naming(
        layers={"self_attn.q_layernorm": "self_attn.q_norm", "self_attn.k_layernorm": "self_attn.k_norm"}
    ),
    "phi": Naming(
        top={"final_layernorm": "model.norm"},
        layers={
            "self_attn.dense": "self_attn.o_proj",
            "self_attn.q_layernorm": "self_attn.q_norm",
            "self_attn.k_layernorm": "self_attn.k_norm",
            "mlp.fc1": "mlp.up_proj",
            "mlp.fc2": "mlp.down_proj",
        },
    ),
    # Its experts and router keep their own names: model/expert_reader.py knows the layouts.
    "llama4_text": Naming(
        layers={f"feed_forward.{part}": f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")}
    ),
    "gpt_neox": Naming(
        "gpt_neox.",
        top={"embed_in": "model.embed_tokens", "final_layer_norm": "model.norm", "embed_out": "lm_head"},
        layers={"attention.query_key_value": "self_attn.qkv_proj", "attention.dense": "self_attn.o_proj", **_MLP_4H},
        grouped_qkv=True,
        buffers=(".attention.bias", ".attention.masked_bias"),
    ),
    "falcon": Naming(
        "transformer.",
        "h.",
        top={"word_embeddings": "model.embed_tokens", "ln_f": "model.norm"},
        layers={
            "self_attention.query_key_value": "self_attn.qkv_proj",
            "self_attention.dense": "self_attn.o_proj",
            "ln_attn": "input_layernorm",
            "ln_mlp": "post_attention_layernorm",
            **_MLP_4H,
        },
        grouped_qkv=True,
    ),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), _MAMBA),
    "gpt2": Naming(
        "transformer.",
        "h.",
        top={"wte": "model.embed_tokens", "wpe": "model.position_embeddings", "ln_f": "model.norm"},
        layers={
            "ln_1": "input_layernorm",
            "ln_2": "post_attention_layernorm",
            "attn.c_attn": "self_attn.qkv_proj",
            "attn.c_proj": "self_attn.o_proj",
            "mlp.c_fc": "mlp.up_proj",
            "mlp.c_proj": "mlp.down_proj",
        },
        transposed=("self_attn.qkv_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"),
        buffers=(".attn.bias", ".attn.masked_bias"),
    ),
}


def naming_of(architecture: str) -> Naming:
    return NAMINGS.get(architecture, _PLAIN)


@dataclass(frozen=True, slots=True)
class CanonicalName:
    name: str
    transposed: bool = False
    part: int | None = None  # of a vector that the file keeps in parts: which one


def canonical(naming: Naming, name: str) -> CanonicalName | None:
    """The canonical name of a stored tensor; None for one that is computed, not read."""
    if name.endswith(naming.buffers) and naming.buffers:
        return None
    stem, _, leaf = name.removeprefix(naming.prefix).rpartition(".")
    if stem in naming.top:
        return CanonicalName(f"{naming.top[stem]}.{leaf}")
    inner = name.removeprefix(naming.prefix)
    match = _LAYER.fullmatch(inner.removeprefix(naming.layer_prefix)) if inner.startswith(naming.layer_prefix) else None
    if match is None:
        return CanonicalName(name)
    number, module, leaf = match.groups()
    module = _renamed(naming, module)
    transposed = leaf == "weight" and module in naming.transposed
    if heads := _HEAD_NORM.fullmatch(module):
        return CanonicalName(f"model.layers.{int(number)}.{heads[1]}.{leaf}", part=int(heads[2]))
    return CanonicalName(f"model.layers.{int(number)}.{module}.{leaf}", transposed)


def stored_name(naming: Naming, name: str) -> str:
    """The inverse of `canonical`, for a tensor or a module: how a file of this naming calls it. Only for namings that
    join and transpose nothing."""
    for ours, theirs in naming.top.items():
        if name == theirs or name.startswith(f"{theirs}."):
            return f"{naming.prefix}{ours}" + name.removeprefix(theirs)
    if not name.startswith(_CANONICAL_LAYERS):
        return name
    number, _, module = name.removeprefix(_CANONICAL_LAYERS).partition(".")
    for ours, theirs in naming.layers.items():
        if module == theirs or module.startswith(f"{theirs}."):
            module = ours + module.removeprefix(theirs)
            break
    return f"{naming.prefix}{naming.layer_prefix}{number}.{module}"


def _renamed(naming: Naming, module: str) -> str:
    for ours, theirs in naming.layers.items():
        if module == ours or module.startswith(f"{ours}."):
            return theirs + module.removeprefix(ours)
    return module
