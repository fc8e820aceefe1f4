"""A Hugging Face config.json -> ModelDescription, for every model type: one reader for engine, quantizer and planner.

Reads old keys (rope_theta, rope_scaling) and those of transformers 5 (rope_parameters, nested by layer type for Gemma
3). Where a key is absent, the default is that of transformers' own config class (configs/families.py). What is wrong in
the file is refused here; what the engine does not run is not: architectures decline it by name. Touches no files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.checkpoint.configs.families import FAMILIES, Family, family_of
from tokenmill.checkpoint.configs.feed_forward import feed_forward
from tokenmill.checkpoint.configs.layer_kinds import layer_kinds
from tokenmill.checkpoint.configs.mixers import head_sizes, in_layer, is_latent, mixers_by_kind, positions, softcap
from tokenmill.checkpoint.configs.rope import rope_tables
from tokenmill.checkpoint.description import LayerDescription, ModelDescription, RopeTable
from tokenmill.checkpoint.fields import Fields
from tokenmill.errors import CheckpointError

_LABEL = "config.json"
_REMEDY = "correct config.json, or download the model again"
_MAX_LAYERS = 10_000
# Where model types spell a size in their own way.
_SPELLINGS = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head", "num_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "model_max_length"),
    "num_key_value_heads": ("num_kv_heads",),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "moe_topk"),
}


def describe(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelDescription:
    """`generation` is generation_config.json, which may name further end-of-text ids."""
    outer = Fields(config, _LABEL, _REMEDY)
    text = Fields(_spelled({**config, **outer.mapping("text_config")}), _LABEL, _REMEDY)
    model_type = outer.text("model_type", "") or text.text("model_type", "")
    if not model_type:
        raise CheckpointError(f"{_LABEL}: 'model_type' is missing", _REMEDY)
    text_type = text.text("model_type", model_type)
    family = _with_positions(family_of(text_type), text)
    is_text_model = text_type == model_type or model_type in FAMILIES  # else a wrapper around one that we know
    sizes = dict(family.sizes)
    hidden_size = text.integer("hidden_size", sizes.get("hidden_size"))
    context_length = text.integer("max_position_embeddings", family.context_length)
    tables = _tables(text, family, hidden_size, context_length)
    description = ModelDescription(
        architecture=(family.architecture or text_type) if is_text_model else model_type,
        model_type=model_type,
        hidden_size=hidden_size,
        layers=_layers(text, family, hidden_size, tables),
        vocab_size=text.integer("vocab_size", sizes.get("vocab_size")),
        context_length=context_length,
        norm_eps=text.number(family.eps_key, text.number("rms_norm_eps", family.norm_eps)),
        norm=family.norm,
        norm_bias=family.norm_bias,
        norm_offset=family.norm_offset,
        rope_tables=tables,
        rope_interleaved=family.rope_interleaved,
        positions=positions(text, family),
        head_bias=family.head_bias,
        tie_embeddings=outer.flag("tie_word_embeddings", text.flag("tie_word_embeddings", family.tie_embeddings)),
        overflows_float16=family.overflows_float16,
        draft_layers=text.integer("num_nextn_predict_layers", 0, low=0),
        vision_parameters=_vision_parameters(outer),
        other_features=(*family.other_features, *_unread(text)),
        bos_id=_bos_id(generation, outer, text, family),
        eos_ids=_eos_ids(generation, outer, text, family),
        name=outer.text("_name_or_path", ""),
    )
    return _with_scales(description, text, family)


def _with_positions(family: Family, text: Fields) -> Family:
    """Granite's hybrids say whether they rotate; their family does not unless they say so."""
    rotates_if_asked = family.positions == "none" and text.raw("position_embedding_type") == "rope"
    return replace(family, positions="rope") if rotates_if_asked else family


def _unread(text: Fields) -> tuple[str, ...]:
    """What a key of the config switches on and the description has no field for."""
    return ("clipped queries, keys and values",) if text.raw("clip_qkv") is not None else ()


def _spelled(values: dict[str, Any]) -> dict[str, Any]:
    """With sizes under the names that the rest of this reader uses."""
    for name, spellings in _SPELLINGS.items():
        present = [values[spelling] for spelling in spellings if values.get(spelling) is not None]
        if present and values.get(name) is None:
            values[name] = present[0]
    return values


def _tables(text: Fields, family: Family, hidden_size: int, context_length: int) -> tuple[RopeTable, ...]:
    if positions(text, family) != "rope":
        return ()
    if is_latent(text, family):
        head_dim = text.integer("qk_rope_head_dim")
        if head_dim % 2:
            raise text.error(f"'qk_rope_head_dim' is {head_dim}, which is odd")
    else:
        num_heads = text.integer("num_attention_heads", dict(family.sizes).get("num_attention_heads"))
        head_dim = head_sizes(text, family, hidden_size, num_heads)[1]
    return rope_tables(text, family, head_dim, context_length)


def _layers(
    text: Fields, family: Family, hidden_size: int, tables: tuple[RopeTable, ...]
) -> tuple[LayerDescription, ...]:
    num_layers = text.integer("num_hidden_layers", dict(family.sizes).get("num_hidden_layers"))
    if num_layers > _MAX_LAYERS:
        raise text.wrong("num_hidden_layers", num_layers)
    window, kinds = layer_kinds(text, family, num_layers)
    mixers = mixers_by_kind(text, family, hidden_size, set(kinds), window, tables)
    norms = _norms(text, family)
    layers = []
    for number, kind in enumerate(kinds):
        ffn = feed_forward(text, family, hidden_size, number)
        own = tuple(in_layer(mixer, text, family, number) for mixer in mixers[kind])
        layers.append(LayerDescription(own, ffn, norms))
    return tuple(layers)


def _norms(text: Fields, family: Family) -> str:
    """Where the norms of a layer are, and whether its halves are parallel."""
    if text.flag("new_decoder_architecture", False):  # Falcon-40B
        return "parallel" if text.integer("num_ln_in_parallel_attn", 2) == 1 else "parallel_norms"
    if family.parallel_key and not text.flag(family.parallel_key, family.parallel):
        return "pre"
    return family.norms


def _with_scales(description: ModelDescription, text: Fields, family: Family) -> ModelDescription:
    """Constants that multiply embeddings, residual branches and logits."""
    plain = math.sqrt(description.hidden_size) if family.scales_embedding else 1.0
    return replace(
        description,
        embedding_scale=text.number("embedding_multiplier", plain),
        residual_scale=text.number("residual_multiplier", 1.0),
        logit_scale=text.number("logit_scale", text.number("lm_head_multiplier", family.logit_scale))
        / text.number("logits_scaling", 1.0, low=1e-9),
        logit_softcap=softcap(text, "final_logit_softcapping", family.logit_softcap),
    )


def _vision_parameters(config: Fields) -> int:
    """Parameters of the image tower: stated, or counted as a plain transformer from `vision_config`."""
    if config.raw("vision_parameters"):
        return config.integer("vision_parameters")
    vision = Fields(config.mapping("vision_config"), _LABEL, _REMEDY)
    if not vision.raw("hidden_size"):
        return 0
    width = vision.integer("hidden_size")
    inner = vision.integer("intermediate_size", 4 * width)
    depth = vision.integer("num_hidden_layers", vision.integer("depth", 24))
    return depth * (4 * width * width + 2 * width * inner)


def _ids(fields: Fields, name: str) -> list[int]:
    """One id or a list of ids."""
    value = fields.raw(name)
    values = value if isinstance(value, list) else [value]
    if any(entry is not None and (isinstance(entry, bool) or not isinstance(entry, int)) for entry in values):
        raise fields.wrong(name, value)
    return [entry for entry in values if entry is not None and entry >= 0]


def _eos_ids(generation: Mapping[str, Any] | None, outer: Fields, text: Fields, family: Family) -> tuple[int, ...]:
    """generation_config.json's ids first, then those of the config."""
    ids = _ids(Fields(generation or {}, "generation_config.json", _REMEDY), "eos_token_id")
    ids += _ids(outer, "eos_token_id") or _ids(text, "eos_token_id")
    if not ids and family.eos_id is not None:
        ids = [family.eos_id]
    return tuple(dict.fromkeys(ids))


def _bos_id(generation: Mapping[str, Any] | None, outer: Fields, text: Fields, family: Family) -> int | None:
    ids = _ids(outer, "bos_token_id") or _ids(text, "bos_token_id")
    ids = ids or _ids(Fields(generation or {}, "generation_config.json", _REMEDY), "bos_token_id")
    return ids[0] if ids else family.bos_id
