"""GGUF metadata -> ModelDescription: which keys each architecture uses, which defaults, which variants we refuse.

The facts follow llama.cpp, which is what GGUF files are written for. Sees tensor shapes only to learn what the
metadata does not say (vocabulary size, biases, tied embeddings). Used by gguf.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tokenmill.checkpoint import gguf_hybrid, gguf_latent, gguf_recurrent
from tokenmill.checkpoint.description import FeedForward, LayerDescription, ModelDescription, RopeScaling, RopeTable
from tokenmill.checkpoint.fields import UNSUPPORTED, Fields, shown
from tokenmill.checkpoint.gguf_experts import with_experts
from tokenmill.checkpoint.gguf_families import FAMILIES, GGUFFamily
from tokenmill.checkpoint.gguf_metadata import Metadata
from tokenmill.checkpoint.mapped_file import DAMAGED
from tokenmill.checkpoint.mixers import Attention, Mixer, Recurrent
from tokenmill.errors import CheckpointError

ARCHITECTURES = {name: family.architecture for name, family in FAMILIES.items()}
_FIRST = "model.layers.0"
LONGROPE_FACTORS = _LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_CONTROL_TOKEN = 3
# Control tokens that end a turn or a text whatever the metadata names as end-of-text.
_END_TOKENS = frozenset(
    (
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|end|>",
        "<end_of_turn>",
        "<eos>",
        "<EOT>",
    )
)


def describe(
    metadata: Metadata,
    shapes: Mapping[str, tuple[int, ...]],
    label: str,
    numbers: Callable[[str], tuple[float, ...]] = lambda _name: (),
) -> ModelDescription:
    """`shapes` are those of the tensors, by canonical name; `numbers` reads a small float vector."""
    stored_as = read_architecture(metadata, label)
    fields = Fields(metadata, label, DAMAGED, prefix=f"{stored_as}.")
    family = _with_positions(FAMILIES[stored_as], fields)
    draft_layers = fields.integer("nextn_predict_layers", 0, low=0)
    num_layers = fields.integer("block_count") - draft_layers
    if num_layers > len(shapes):
        raise fields.error(f"{num_layers} layers but only {len(shapes)} tensors")
    hidden_size = fields.integer("embedding_length")
    vocab_size = _vocab_size(fields, shapes, hidden_size)
    _refuse_variants(fields)
    mixer = _mixer(fields, family, shapes, hidden_size, num_layers)
    window, kinds = _layer_kinds(fields, family, num_layers)
    bos_id, eos_ids = _token_ids(metadata, vocab_size, label)
    name = metadata.get("general.name")
    tables: tuple[RopeTable, ...] = ()
    mlp: FeedForward | None = None
    if not isinstance(mixer, Recurrent):
        tables = _rope_tables(fields, family, mixer.head_dim, "sliding" in kinds, numbers)
        mlp_bias = any(f"{_FIRST}.{name}.up_proj.bias" in shapes for name in ("mlp", "feed_forward"))
        mlp = FeedForward(_dense_size(fields), family.gated, family.activation, bias=mlp_bias)
    mixers: list[tuple[Mixer, ...]] = [(mixer,)] * num_layers
    if isinstance(mixer, Attention):
        mixers = [(each,) for each in _attentions(mixer, family, kinds, window, len(tables) > 1)]
    if family.hybrid:
        mixers = gguf_hybrid.mixers(fields, family, mixers, hidden_size, f"{_FIRST}.mamba.norm.weight" in shapes)
    norms = _norms(fields, family, shapes)
    description = ModelDescription(
        architecture=_architecture(fields, family, mixer, "sliding" in kinds),
        model_type=stored_as,
        hidden_size=hidden_size,
        layers=tuple(LayerDescription(each, mlp, norms) for each in mixers),
        vocab_size=vocab_size,
        context_length=fields.integer("context_length"),
        norm_eps=fields.number(f"attention.layer_norm_{'rms_' if family.norm == 'rms' else ''}epsilon"),
        norm=family.norm,
        norm_bias="model.norm.bias" in shapes,
        rope_tables=tables,
        rope_interleaved=family.interleaved,
        positions=family.positions,
        tie_embeddings="lm_head.weight" not in shapes,
        head_bias="lm_head.bias" in shapes,
        embedding_scale=_embedding_scale(fields, family, hidden_size),
        residual_scale=fields.number("residual_scale", 1.0) or 1.0,
        logit_scale=_logit_scale(fields, family),
        logit_softcap=fields.number("final_logit_softcapping", 0.0) if family.softcaps else 0.0,
        overflows_float16=family.overflows_float16,
        bos_id=bos_id,
        eos_ids=eos_ids,
        draft_layers=draft_layers,
        name=name if isinstance(name, str) else "",
    )
    has_experts = fields.integer("expert_count", 0, low=0) > 0
    return with_experts(description, fields, shapes, stored_as) if has_experts else description


def _with_positions(family: GGUFFamily, fields: Fields) -> GGUFFamily:
    """Hybrids without rotary embedding have no positions at all."""
    return replace(family, positions="none") if family.hybrid and not _has_rope(fields, family) else family


def _dense_size(fields: Fields) -> int:
    """Width of the dense MLPs; of experts, where there are no others."""
    default = fields.integer("expert_feed_forward_length", 0, low=0)
    return fields.integer("feed_forward_length", default or None)


def _architecture(fields: Fields, family: GGUFFamily, mixer: Mixer, slides: bool) -> str:
    """OLMo 3 is stored as OLMo 2 with a window, DeepSeek-V2 and V3 under one name."""
    if isinstance(mixer, Recurrent):
        return gguf_recurrent.architecture_of(mixer)
    if family.latent:
        return gguf_latent.architecture_of(fields)
    return "olmo3" if family.architecture == "olmo2" and slides else family.architecture


def _mixer(
    fields: Fields, family: GGUFFamily, shapes: Mapping[str, tuple[int, ...]], hidden_size: int, num_layers: int
) -> Mixer:
    """As all layers have it, but for windows and rotary embedding."""
    if family.recurrent:
        return gguf_recurrent.read_mixer(fields, family.recurrent, hidden_size)
    if family.latent:
        return gguf_latent.read_mixer(fields)
    return _attention(fields, family, shapes, hidden_size, num_layers)


def _attention(
    fields: Fields, family: GGUFFamily, shapes: Mapping[str, tuple[int, ...]], hidden_size: int, num_layers: int
) -> Attention:
    num_heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if family.hybrid:
        num_kv_heads = gguf_hybrid.num_kv_heads(fields)
    else:
        num_kv_heads = fields.integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            f"'attention.head_count' is {num_heads}, no multiple of {num_kv_heads} ('attention.head_count_kv')"
        )
    if head_dim < 1 or (fields.raw("attention.key_length") is None and hidden_size % num_heads):
        raise fields.error(f"'embedding_length' is {hidden_size}, no multiple of {num_heads} ('attention.head_count')")
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.error("keys and values have different sizes", UNSUPPORTED)
    scale = fields.number("attention.scale", 0.0) or None
    if family.scale_by_head:
        size = max(hidden_size // num_heads, 1) if num_layers == family.odd_layers else head_dim
        scale = size**-0.5
    has_head_norms = f"{_FIRST}.self_attn.q_norm.weight" in shapes
    return Attention(
        num_heads,
        num_kv_heads,
        head_dim,
        head_dim,
        rope="full" if family.positions == "rope" and _has_rope(fields, family) else "",
        scale=scale,
        softcap=fields.number("attn_logit_softcapping", 0.0) if family.softcaps else 0.0,
        qkv_bias=any(f"{_FIRST}.self_attn.{part}.bias" in shapes for part in ("q_proj", "qkv_proj")),
        output_bias=f"{_FIRST}.self_attn.o_proj.bias" in shapes,
        head_norms=family.head_norms or (family.optional_head_norms if has_head_norms else ""),
        output_gate=family.output_gate,
    )


def _attentions(
    attention: Attention, family: GGUFFamily, kinds: Sequence[str], window: int, own_table: bool
) -> Iterator[Attention]:
    """Of each layer; `own_table`: sliding layers have a rotary table of their own."""
    for number, kind in enumerate(kinds):
        rope = "sliding" if kind == "sliding" and own_table else attention.rope
        rope = rope if _rotates(family, number, kind) else ""
        yield replace(attention, window=window if kind == "sliding" else 0, rope=rope)


def _norms(fields: Fields, family: GGUFFamily, shapes: Mapping[str, tuple[int, ...]]) -> str:
    if family.norms == "parallel_norms" and not fields.flag("use_parallel_residual", True):
        return "pre"
    if family.norms:
        return family.norms
    # StableLM and Falcon: by the norms there are. Without a second one the halves share the first.
    if f"{_FIRST}.post_attention_layernorm.weight" not in shapes:
        return "parallel"
    return "pre" if family.gated else "parallel_norms"


def _has_rope(fields: Fields, family: GGUFFamily) -> bool:
    return not family.optional_rope or fields.flag("rope.scaling.finetuned", True)


def _rotates(family: GGUFFamily, layer: int, kind: str) -> bool:
    if family.rope_layers == "sliding":
        return kind == "sliding"
    return family.rope_layers == "all" or (layer + 1) % 4 != 0


def _rope_tables(
    fields: Fields, family: GGUFFamily, head_dim: int, slides: bool, numbers: Callable[[str], tuple[float, ...]]
) -> tuple[RopeTable, ...]:
    if family.positions != "rope":
        return ()
    size = fields.integer("rope.dimension_count", head_dim)
    if size > head_dim or size % 2:
        raise fields.error(f"{size} of {head_dim} numbers of a head cannot be rotated in pairs")
    theta = fields.number("rope.freq_base", family.theta, low=1.0)
    scaling = _longrope(fields, numbers, size // 2) or _rope_scaling(fields, family.latent)
    tables = [RopeTable("full", size, theta, scaling)]
    if family.local_theta and (slides or family.default_local_theta):
        local = fields.number("rope.freq_base_swa", family.default_local_theta or theta, low=1.0)
        tables.append(RopeTable("sliding", size, local))
    return tuple(tables)


def _longrope(fields: Fields, numbers: Callable[[str], tuple[float, ...]], count: int) -> RopeScaling | None:
    """The two lists of divisors are tensors."""
    long_factors, short_factors = numbers(_LONG_FACTORS), numbers(_SHORT_FACTORS)
    if not long_factors and not short_factors:
        return None
    if not len(long_factors) == len(short_factors) == count:
        raise fields.error(
            f"'{_LONG_FACTORS}' and '{_SHORT_FACTORS}' have {len(long_factors)} and {len(short_factors)} numbers, "
            f"{count} are needed"
        )
    context = fields.integer("context_length")
    original = fields.integer("rope.scaling.original_context_length", context)
    factor = fields.number("rope.scaling.attn_factor", 1.0)
    return RopeScaling(
        "longrope",
        context / original,
        original,
        attention_factor=factor,
        short_factors=short_factors,
        long_factors=long_factors,
    )


def _embedding_scale(fields: Fields, family: GGUFFamily, hidden_size: int) -> float:
    plain = math.sqrt(hidden_size) if family.scales_embedding else 1.0
    return fields.number("embedding_scale", plain) or plain


def _logit_scale(fields: Fields, family: GGUFFamily) -> float:
    if not family.logit_scale:
        return 1.0
    scale = fields.number("logit_scale", 1.0) or 1.0
    return scale if family.logit_scale == "multiplies" else 1.0 / scale


def read_architecture(metadata: Mapping[str, Any], label: str) -> str:
    """`general.architecture`, if it is one that we run and the file is whole."""
    splits = metadata.get("split.count", 0)
    if isinstance(splits, int) and splits > 1:
        raise CheckpointError(
            f"{label} is one of {splits} parts of a split GGUF", "join them with `llama-gguf-split --merge` first"
        )
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{label} does not say which architecture it is ('general.architecture')", DAMAGED)
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{label}: architecture {shown(name)} is not supported", f"supported: {', '.join(ARCHITECTURES)}"
        )
    return name


def _vocab_size(fields: Fields, shapes: Mapping[str, tuple[int, ...]], hidden_size: int) -> int:
    shape = shapes.get("model.embed_tokens.weight")
    if shape is None:
        raise fields.error("there is no embedding ('token_embd.weight')", "give a GGUF of the whole model")
    if len(shape) != 2 or shape[1] != hidden_size:
        raise fields.error(f"the embedding has shape {list(shape)}, metadata says width {hidden_size}")
    return shape[0]


def _refuse_variants(fields: Fields) -> None:
    """Keys that change the computation in ways the description cannot express."""
    if any(fields.integers("rope.dimension_sections")):
        raise fields.error("it rotates by sections of each head (M-RoPE)", UNSUPPORTED)
    if fields.number("attention.temperature_scale", 0.0) > 0:
        raise fields.error("it scales attention by position", UNSUPPORTED)
    if fields.raw("attention.causal") is False:
        raise fields.error("its attention is not causal", "only decoder models are supported")


def _layer_kinds(fields: Fields, family: GGUFFamily, num_layers: int) -> tuple[int, tuple[str, ...]]:
    """Window and kind of each layer."""
    window = fields.integer("attention.sliding_window", family.window, low=0)
    if window == 0 or family.sliding == "never":
        return 0, ("full",) * num_layers
    if family.sliding == "all":
        return window, ("sliding",) * num_layers
    pattern = fields.raw("attention.sliding_window_pattern")
    if isinstance(pattern, list):  # newer files: for each layer, whether it slides
        if len(pattern) != num_layers:
            raise fields.error(f"the sliding window pattern has {len(pattern)} entries for {num_layers} layers")
        return window, tuple("sliding" if slides else "full" for slides in pattern)
    period = fields.integer("attention.sliding_window_pattern", family.period)
    return window, tuple("full" if (layer + 1) % period == 0 else "sliding" for layer in range(num_layers))


def _rope_scaling(fields: Fields, is_latent: bool) -> RopeScaling:
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0))
    kind = fields.text("rope.scaling.type", "linear")
    if factor in (0.0, 1.0) or kind == "none":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind != "yarn":
        raise fields.error(f"rope scaling '{kind}' is not supported", "supported: none, linear, yarn")
    mscale = gguf_latent.read_mscale(fields) if is_latent else 0.0
    if not is_latent and fields.number("rope.scaling.yarn_log_multiplier", 0.0) > 0:
        raise fields.error("it scales rotary magnitudes by 'yarn_log_multiplier'", UNSUPPORTED)
    attention_factor = fields.number("rope.scaling.attn_factor", fields.number("rope.scaling.yarn_attn_factor", 0.0))
    derived = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context=fields.integer("rope.scaling.original_context_length", fields.integer("context_length")),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention_factor * derived if attention_factor else None,
        mscale=mscale,
        mscale_all_dim=mscale,
    )


def _token_ids(metadata: Metadata, vocab_size: int, label: str) -> tuple[int | None, tuple[int, ...]]:
    """Begin-of-text id, and all ids that end a generation: the named one first."""

    def read(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            raise CheckpointError(
                f"{label}: 'tokenizer.ggml.{name}_token_id' is {shown(value)} of {vocab_size}", DAMAGED
            )
        return value

    named = [token_id for token_id in (read("eos"), read("eot"), read("eom")) if token_id is not None]
    return read("bos"), tuple(dict.fromkeys([*named, *_control_end_tokens(metadata, vocab_size)]))


def _control_end_tokens(metadata: Metadata, vocab_size: int) -> list[int]:
    tokens, types = "tokenizer.ggml.tokens", metadata.numbers("tokenizer.ggml.token_type")
    if types is None or metadata.string_count(tokens) == 0:
        return []
    known = min(len(types), metadata.string_count(tokens), vocab_size)
    control = np.flatnonzero(types[:known] == _CONTROL_TOKEN).tolist()
    texts = metadata.strings_at(tokens, control)
    return [token_id for token_id, text in zip(control, texts, strict=True) if text in _END_TOKENS]
