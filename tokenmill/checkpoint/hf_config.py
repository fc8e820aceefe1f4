"""A Hugging Face config.json -> ModelDescription, for the model types we run.

Reads old keys (rope_theta, rope_scaling) and those of transformers 5 (rope_parameters, nested by layer type for Gemma
3). Where a key is absent, the default is that of transformers' own config class. Touches no files. Used by
safetensors.py and by the planner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.checkpoint.description import ModelDescription, RopeScaling
from tokenmill.checkpoint.fields import UNSUPPORTED, Fields, shown
from tokenmill.errors import CheckpointError

_LABEL = "config.json"
_REMEDY = "correct config.json, or download the model again"
_MAX_LAYERS = 10_000
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_LAYER_KINDS = {"full_attention": "full", "sliding_attention": "sliding"}


@dataclass(frozen=True, slots=True)
class _Family:
    """One model type: our architecture, and the defaults of its config class."""

    architecture: str
    context_length: int
    num_kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden size / heads
    sliding_window: int = 4096
    rope_theta: float = 1e4
    activation_key: str = "hidden_act"
    activation: str = "silu"
    bos_id: int | None = None
    eos_id: int | None = None
    tie_embeddings: bool = False
    # Published Gemma 3 configs leave most sizes out; elsewhere a missing size is a damaged file.
    sizes: tuple[tuple[str, int], ...] = ()


_GEMMA3 = _Family(
    "gemma3",
    context_length=131_072,
    num_kv_heads=4,
    head_dim=256,
    rope_theta=1e6,
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
    bos_id=2,
    eos_id=1,
    tie_embeddings=True,
    sizes=(
        ("hidden_size", 2304),
        ("intermediate_size", 9216),
        ("num_hidden_layers", 26),
        ("num_attention_heads", 8),
        ("vocab_size", 262_208),
    ),
)
_FAMILIES = {
    "llama": _Family("llama", context_length=2048, bos_id=1, eos_id=2),
    "mistral": _Family("llama", context_length=131_072, num_kv_heads=8, bos_id=1, eos_id=2),
    "qwen2": _Family("qwen2", context_length=32_768, num_kv_heads=32),
    "qwen3": _Family("qwen3", context_length=32_768, num_kv_heads=32, head_dim=128),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
}


def describe(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelDescription:
    """`generation` is generation_config.json, which may name further end-of-text ids."""
    model_type = config.get("model_type")
    if model_type not in _FAMILIES:
        problem = f"model type {shown(model_type)} is not supported" if model_type else "'model_type' is missing"
        raise CheckpointError(f"{_LABEL}: {problem}", f"supported: {', '.join(_FAMILIES)}")
    family = _FAMILIES[model_type]
    outer = Fields(config, _LABEL, _REMEDY)
    text = Fields(outer.mapping("text_config"), _LABEL, _REMEDY) if model_type == "gemma3" else outer
    _refuse_variants(text)
    sizes = dict(family.sizes)
    hidden_size = text.integer("hidden_size", sizes.get("hidden_size"))
    num_layers = text.integer("num_hidden_layers", sizes.get("num_hidden_layers"))
    if num_layers > _MAX_LAYERS:
        raise text.wrong("num_hidden_layers", num_layers)
    num_heads = text.integer("num_attention_heads", sizes.get("num_attention_heads"))
    num_kv_heads, head_dim = _head_sizes(text, family, hidden_size, num_heads)
    window, kinds = _layer_kinds(text, family, str(model_type), num_layers)
    context_length = text.integer("max_position_embeddings", family.context_length)
    theta, scaling = _rope(text, family.rope_theta, context_length)
    bias = model_type != "mistral" and text.flag("attention_bias", False)
    description = ModelDescription(
        architecture=family.architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=text.integer("intermediate_size", sizes.get("intermediate_size")),
        vocab_size=text.integer("vocab_size", sizes.get("vocab_size")),
        context_length=context_length,
        norm_eps=text.number("rms_norm_eps", 1e-6),
        activation=_activation(text, family),
        rope_theta=theta,
        rope_scaling=scaling,
        layer_kinds=kinds,
        sliding_window=window,
        qkv_bias=model_type == "qwen2" or bias,
        output_bias=model_type != "qwen2" and bias,
        mlp_bias=model_type == "llama" and text.flag("mlp_bias", False),
        tie_embeddings=outer.flag("tie_word_embeddings", text.flag("tie_word_embeddings", family.tie_embeddings)),
        bos_id=_bos_id(generation, outer, text, family),
        eos_ids=_eos_ids(generation, outer, text, family),
        name=outer.text("_name_or_path", ""),
    )
    return _with_gemma(description, text) if family is _GEMMA3 else description


def _with_gemma(description: ModelDescription, text: Fields) -> ModelDescription:
    """What only Gemma has. Its files store norm weights minus one."""
    return replace(
        description,
        local_rope_theta=_local_rope_theta(text),
        norm_offset=1.0,
        query_scale=text.number("query_pre_attn_scalar", 256.0, low=1e-6) ** -0.5,
        embedding_scale=math.sqrt(description.hidden_size),
        attention_softcap=text.number("attn_logit_softcapping", 0.0),
        logit_softcap=text.number("final_logit_softcapping", 0.0),
    )


def _refuse_variants(text: Fields) -> None:
    """Settings that change the computation in ways the description cannot express."""
    if text.flag("use_bidirectional_attention", False):
        raise text.error("its attention is not causal", "only decoder models are supported")
    for values in (text, Fields(text.mapping("rope_parameters"), _LABEL, _REMEDY)):
        if values.number("partial_rotary_factor", 1.0) != 1.0:
            raise text.error("only a part of each head is rotated", UNSUPPORTED)


def _head_sizes(text: Fields, family: _Family, hidden_size: int, num_heads: int) -> tuple[int, int]:
    """(KV heads, head size)."""
    num_kv_heads = text.integer("num_key_value_heads", family.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise text.error(f"{num_heads} heads cannot share {num_kv_heads} KV heads")
    if family.head_dim is None and text.raw("head_dim") is None and hidden_size % num_heads:
        raise text.error(f"hidden size {hidden_size} is not a multiple of {num_heads} heads")
    head_dim = text.integer("head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise text.error(f"head size {head_dim} is odd")
    return num_kv_heads, head_dim


def _layer_kinds(text: Fields, family: _Family, model_type: str, num_layers: int) -> tuple[int, tuple[str, ...]]:
    """Window and kind of each layer; the window is 0 where no layer slides."""
    kinds: tuple[str, ...] = ("full",) * num_layers
    window = 0
    if model_type == "mistral":
        absent = "sliding_window" not in text.values  # null switches it off, absence does not
        window = family.sliding_window if absent else text.integer("sliding_window", 0, low=0)
        kinds = ("sliding",) * num_layers if window else kinds
    elif family is _GEMMA3:
        window = text.integer("sliding_window", family.sliding_window)
        period = text.integer("sliding_window_pattern", text.integer("_sliding_window_pattern", 6))
        kinds = tuple("full" if (layer + 1) % period == 0 else "sliding" for layer in range(num_layers))
    elif family.architecture in ("qwen2", "qwen3") and text.flag("use_sliding_window", False):
        window = text.integer("sliding_window", family.sliding_window)
        first = text.integer("max_window_layers", 28, low=0)
        kinds = tuple("sliding" if layer >= first else "full" for layer in range(num_layers))
    if model_type not in ("llama", "mistral") and text.raw("layer_types") is not None:
        kinds = _listed_kinds(text, num_layers)
    if "sliding" not in kinds:
        return 0, kinds
    if window == 0:
        raise text.error("layers slide but there is no 'sliding_window'")
    return window, kinds


def _listed_kinds(text: Fields, num_layers: int) -> tuple[str, ...]:
    listed = text.raw("layer_types")
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise text.error(f"'layer_types' must list {num_layers} layers")
    unknown = [entry for entry in listed if not isinstance(entry, str) or entry not in _LAYER_KINDS]
    if unknown:
        raise text.error(f"layer type {shown(unknown[0])} is not supported", f"supported: {', '.join(_LAYER_KINDS)}")
    return tuple(_LAYER_KINDS[entry] for entry in listed)


def _activation(text: Fields, family: _Family) -> str:
    name = text.text(family.activation_key, family.activation)
    if name not in _ACTIVATIONS:
        raise text.error(f"activation {shown(name)} is not supported", f"supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _rope_settings(text: Fields, layer_type: str) -> Fields:
    """The rotary settings of one layer type: `rope_parameters` (perhaps nested), under the older `rope_scaling`."""
    settings = text.mapping("rope_parameters")
    if any(key in settings for key in _LAYER_KINDS):
        nested = settings.get(layer_type)
        settings = nested if isinstance(nested, dict) else {}
    if layer_type == "full_attention":
        settings = {**settings, **text.mapping("rope_scaling")}
    return Fields(settings, _LABEL, _REMEDY)


def _rope(text: Fields, default_theta: float, context_length: int) -> tuple[float, RopeScaling]:
    settings = _rope_settings(text, "full_attention")
    theta = settings.number("rope_theta", text.number("rope_theta", default_theta, low=1.0), low=1.0)
    kind = settings.text("rope_type", settings.text("type", "default"))
    original = settings.integer("original_max_position_embeddings", context_length)
    original = text.integer("original_max_position_embeddings", original)
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=settings.number("factor", low=1e-6))
    if kind == "llama3":
        low, high = settings.number("low_freq_factor", low=1e-6), settings.number("high_freq_factor", low=1e-6)
        if high <= low:
            raise settings.error(f"'high_freq_factor' {high:g} must be above 'low_freq_factor' {low:g}")
        factor = settings.number("factor", low=1e-6)
        return theta, RopeScaling("llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
    if kind != "yarn":
        raise settings.error(f"rope type {shown(kind)} is not supported", "supported: default, linear, llama3, yarn")
    given = settings.number("attention_factor", 0.0)
    return theta, RopeScaling(
        kind="yarn",
        factor=settings.number("factor", context_length / original, low=1e-6),
        original_context=original,
        beta_fast=settings.number("beta_fast", 32.0) or 32.0,
        beta_slow=settings.number("beta_slow", 1.0) or 1.0,
        attention_factor=given if settings.raw("attention_factor") is not None else None,
        mscale=settings.number("mscale", 0.0),
        mscale_all_dim=settings.number("mscale_all_dim", 0.0),
        truncate=settings.flag("truncate", True),
    )


def _local_rope_theta(text: Fields) -> float:
    settings = _rope_settings(text, "sliding_attention")
    if settings.text("rope_type", settings.text("type", "default")) != "default":
        raise settings.error("the rotary frequencies of sliding layers are scaled", UNSUPPORTED)
    return settings.number("rope_theta", text.number("rope_local_base_freq", 1e4, low=1.0), low=1.0)


def _ids(fields: Fields, name: str) -> list[int]:
    """One id or a list of ids."""
    value = fields.raw(name)
    values = value if isinstance(value, list) else [value]
    if any(entry is not None and (isinstance(entry, bool) or not isinstance(entry, int)) for entry in values):
        raise fields.wrong(name, value)
    return [entry for entry in values if entry is not None and entry >= 0]


def _eos_ids(generation: Mapping[str, Any] | None, outer: Fields, text: Fields, family: _Family) -> tuple[int, ...]:
    """generation_config.json's ids first, then those of the config."""
    ids = _ids(Fields(generation or {}, "generation_config.json", _REMEDY), "eos_token_id")
    ids += _ids(outer, "eos_token_id") or _ids(text, "eos_token_id")
    if not ids and family.eos_id is not None:
        ids = [family.eos_id]
    return tuple(dict.fromkeys(ids))


def _bos_id(generation: Mapping[str, Any] | None, outer: Fields, text: Fields, family: _Family) -> int | None:
    ids = _ids(outer, "bos_token_id") or _ids(text, "bos_token_id")
    ids = ids or _ids(Fields(generation or {}, "generation_config.json", _REMEDY), "bos_token_id")
    return ids[0] if ids else family.bos_id
