"""Any checkpoint as a GGUF: its metadata, and which tensors the file has, under which names and in which shapes.

From a GGUF the metadata is copied byte for byte. From a Hugging Face directory it is made from the description and the
tokenizer, read back by our own reader and compared, so that a model GGUF cannot describe is refused. Knows nothing of
quantization types. Called by quantize/ggml/export.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tokenmill.checkpoint import gguf_hybrid, gguf_latent, gguf_recurrent
from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.description import ModelDescription, RopeScaling, differences
from tokenmill.checkpoint.gguf import GGUFCheckpoint
from tokenmill.checkpoint.gguf_description import LONGROPE_FACTORS, describe
from tokenmill.checkpoint.gguf_experts import expert_shapes, expert_values
from tokenmill.checkpoint.gguf_families import FAMILIES, STORED_AS, GGUFFamily
from tokenmill.checkpoint.gguf_header import read_gguf_raw_pairs
from tokenmill.checkpoint.gguf_metadata import Metadata
from tokenmill.checkpoint.gguf_names import SECOND_NORM, gguf_name
from tokenmill.checkpoint.gguf_vocabulary import vocabulary_values
from tokenmill.checkpoint.gguf_writer import Value, pack_value
from tokenmill.checkpoint.hf_export import ROPE_DIVISORS
from tokenmill.checkpoint.mixers import Recurrent
from tokenmill.checkpoint.rope_divisors import llama3_divisors, longrope_magnitude
from tokenmill.checkpoint.tensor_views import FUSED_GATE_UP, FUSED_QKV
from tokenmill.errors import CheckpointError

QUANTIZATION_VERSION = 2
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# What the layout of the weights or the tokenizer says instead.
_NOT_COMPARED = ("bos_id", "eos_ids", "name", "rope_interleaved", "norm_offset", "vision_parameters")
_GATE_UP = (FUSED_GATE_UP, ("mlp.gate_proj", "mlp.up_proj"))
_QKV = (FUSED_QKV, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
_COHERE_NORMED_LAYERS = 64
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """`source` is the canonical name to read from; empty for rotary divisors, which follow from the config.

    `rest`: the tensors whose rows follow, where the file joins matrices; `rows`: those that are taken of the source,
    where the file keeps parts of it apart."""

    name: str  # in the file
    source: str
    shape: tuple[int, ...]
    rest: tuple[str, ...] = ()
    rows: gguf_hybrid.Ranges = ()  # none: all


def export_metadata(checkpoint: Checkpoint, file_type: int) -> dict[str, bytes]:
    """Key -> packed value."""
    changed = {"general.quantization_version": QUANTIZATION_VERSION, "general.file_type": file_type}
    if isinstance(checkpoint, GGUFCheckpoint):
        pairs = read_gguf_raw_pairs(checkpoint.path)
        for key in (*_SPLIT_KEYS, "general.alignment"):
            pairs.pop(key, None)
    else:
        pairs = {key: pack_value(value) for key, value in _model_values(checkpoint).items()}
    return pairs | {key: pack_value(value) for key, value in changed.items()}


def export_tensors(
    checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]], untied_output: bool = False
) -> list[ExportedTensor]:
    """The tensors of the file in order. `shapes`: of every weight and vector, by canonical name.

    `untied_output` writes the head of a tied model as a matrix of its own, as converters of llama2.c files do.
    """
    d = checkpoint.description
    names = list(shapes)
    if not isinstance(checkpoint, GGUFCheckpoint):
        names.sort(key=_place)
    tensors = [tensor for name in names for tensor in _exported(d, name, shapes)]
    tensors += [ExportedTensor(name, "", (len(values),)) for name, values in derived_tensors(d).items()]
    if untied_output and _HEAD not in shapes:
        tensors.append(ExportedTensor(gguf_name(d.architecture, _HEAD), _EMBEDDING, shapes[_EMBEDDING]))
    return tensors


def _exported(d: ModelDescription, name: str, shapes: dict[str, tuple[int, ...]]) -> list[ExportedTensor]:
    """What a tensor is in the file; nothing for a part of another, which llama.cpp reads as one matrix."""
    family = gguf_family(d)
    # Two norms side by side have other names than one behind the other.
    names: tuple[str, ...] = (SECOND_NORM,) if not family.norms and d.layers[0].norms == "parallel_norms" else ()
    if "experts" in d.features():
        names = (*names, gguf_hybrid.ROUTER)
    joined = ([_GATE_UP] if family.fused_mlp else []) + ([_QKV] if family.fused_qkv else [])
    for module, parts in joined:
        for part in parts:
            if f".{part}." not in name:
                continue
            if part != parts[0]:
                return []
            rest = tuple(name.replace(part, other) for other in parts[1:])
            rows = sum(shapes[each][0] for each in (name, *rest))
            fused = gguf_name(d.architecture, name.replace(part, module), names)
            return [ExportedTensor(fused, name, (rows, *shapes[name][1:]), rest)]
    if apart := gguf_hybrid.parts(name, shapes[name], d):
        sizes = [(sum(end - first for first, end in rows), shapes[name][1]) for _, rows in apart]
        return [
            ExportedTensor(gguf_name(d.architecture, part, names), name, size, rows=rows)
            for (part, rows), size in zip(apart, sizes, strict=True)
        ]
    stored = gguf_latent.exported(name, d) or gguf_recurrent.exported(name, d) or [(name, shapes[name])]
    return [ExportedTensor(gguf_name(d.architecture, part, names), name, shape) for part, shape in stored]


def gguf_family(d: ModelDescription) -> GGUFFamily:
    """How files of this architecture are, or a refusal that names it."""
    stored_as = STORED_AS.get(d.architecture)
    if stored_as is None:
        raise CheckpointError(
            f"a GGUF of architecture '{d.architecture}' cannot be written", f"known: {', '.join(STORED_AS)}"
        )
    return FAMILIES[stored_as]


def derived_tensors(description: ModelDescription) -> dict[str, list[float]]:
    """Tensors that stand for what a config says of rotary frequencies: a divisor for each, by the tensor's name."""
    if not description.rope_tables:
        return {}
    table = description.rope_table("full")
    size, scaling = table.rotary_dim, table.scaling
    if scaling.kind == "longrope":
        return dict(zip(LONGROPE_FACTORS, (list(scaling.long_factors), list(scaling.short_factors)), strict=True))
    if scaling.kind != "llama3":
        return {}
    wavelengths = [2 * math.pi * table.theta ** (2 * pair / size) for pair in range(size // 2)]
    return {ROPE_DIVISORS: llama3_divisors(scaling, wavelengths)}


def _place(name: str) -> tuple[int, int, str]:
    """Embedding, layers in order, final norm, head."""
    if name.startswith("model.layers."):
        return 1, int(name.split(".")[2]), name
    return (0 if name == _EMBEDDING else 2 if name != _HEAD else 3), 0, name


def _model_values(checkpoint: Checkpoint) -> dict[str, Value]:
    description = gguf_hybrid.without_multipliers(checkpoint.description)
    gguf_family(description)
    stored_as = STORED_AS[description.architecture]
    _refuse_unloadable(description, stored_as)
    values: dict[str, Value] = {"general.architecture": stored_as, "general.type": "model"}
    if description.name:
        values["general.name"] = description.name.rstrip("/").rpartition("/")[2]
    values |= {f"{stored_as}.{key}": value for key, value in _architecture_values(description).items()}
    values |= vocabulary_values(checkpoint.path, description.vocab_size)
    _check(values, description)
    return values


def _refuse_unloadable(d: ModelDescription, stored_as: str) -> None:
    """Models that the metadata can describe and llama.cpp's code for the architecture does not load."""
    experts = [layer.feed_forward is not None and layer.feed_forward.num_experts > 0 for layer in d.layers]
    norms = d.layers[0].attention.head_norms if d.layers[0].kind in ("full", "sliding") else ""
    for found, words in (
        (stored_as in ("qwen2moe", "qwen3moe", "qwen3next") and not all(experts), "layers without experts"),
        (stored_as == "deepseek2" and not any(experts), "no experts"),
        (stored_as == "olmoe" and d.num_kv_heads != d.num_heads, "fewer KV heads than heads"),
    ):
        if found:
            raise CheckpointError(f"llama.cpp does not load {words} in '{stored_as}'", "choose a safetensors format")
    if stored_as == "command-r" and norms and d.num_layers < _COHERE_NORMED_LAYERS:
        raise CheckpointError(
            f"llama.cpp does not load norms of heads in 'command-r' with fewer than {_COHERE_NORMED_LAYERS} layers",
            "choose a safetensors format",
        )


def _architecture_values(d: ModelDescription) -> dict[str, Value]:
    family = gguf_family(d)
    values: dict[str, Value] = {
        "block_count": d.num_layers,
        "context_length": d.context_length,
        "embedding_length": d.hidden_size,
        "feed_forward_length": _dense_width(d),
        "attention.head_count": d.num_heads,
        "attention.head_count_kv": d.num_kv_heads,
        f"attention.layer_norm_{'rms_' if d.norm == 'rms' else ''}epsilon": d.norm_eps,
    }
    if family.names_vocabulary:
        values["vocab_size"] = d.vocab_size
    if family.recurrent:
        return values | gguf_recurrent.values(d)
    if family.hybrid:
        values |= gguf_hybrid.values(d, family)
    if "latent" in d.layer_kinds:
        return values | gguf_latent.values(d) | expert_values(d) | _table_values(d, family)
    if family.names_head_size or d.head_dim * d.num_heads != d.hidden_size:
        values |= {"attention.key_length": d.head_dim, "attention.value_length": d.head_dim}
    values |= expert_values(d)
    if d.sliding_window:
        values["attention.sliding_window"] = d.sliding_window
    if family.names_parallel:
        values["use_parallel_residual"] = d.layers[0].norms.startswith("parallel")
    return values | _scale_values(d, family) | _mixed_values(d, family) | _table_values(d, family)


def _dense_width(d: ModelDescription) -> int:
    """Of the dense MLPs; of experts, where there are no others."""
    widths = {ffn.intermediate_size or ffn.expert_size for layer in d.layers if (ffn := layer.feed_forward)}
    dense = {ffn.intermediate_size for layer in d.layers if (ffn := layer.feed_forward) and ffn.intermediate_size}
    return max(dense or widths, default=0)


def _scale_values(d: ModelDescription, family: GGUFFamily) -> dict[str, Value]:
    """Constants that multiply embeddings, residual branches, scores and logits."""
    values: dict[str, Value] = {}
    if family.logit_scale:
        values["logit_scale"] = d.logit_scale if family.logit_scale == "multiplies" else 1.0 / d.logit_scale
    if not family.scales_embedding and d.embedding_scale != 1.0:
        values["embedding_scale"] = d.embedding_scale
    if d.residual_scale != 1.0:
        values["residual_scale"] = d.residual_scale
    scale = next(layer for layer in d.layers if layer.kind != "recurrent").attention.scale
    if scale is not None and not family.scale_by_head:
        values["attention.scale"] = scale
    if d.attention_softcap:
        values["attn_logit_softcapping"] = d.attention_softcap
    if d.logit_softcap:
        values["final_logit_softcapping"] = d.logit_softcap
    return values


def _mixed_values(d: ModelDescription, family: GGUFFamily) -> dict[str, Value]:
    """Full and sliding layers in one model."""
    if family.sliding != "period" or not d.sliding_window:
        return {}
    usual = tuple("full" if (layer + 1) % family.period == 0 else "sliding" for layer in range(d.num_layers))
    if d.layer_kinds == usual:
        return {}
    return {"attention.sliding_window_pattern": [kind == "sliding" for kind in d.layer_kinds]}


def _table_values(d: ModelDescription, family: GGUFFamily) -> dict[str, Value]:
    """Rotary tables: bases, the part of a head that is rotated, scaling."""
    if not d.rope_tables:
        return {}
    full = d.rope_table("full")
    values: dict[str, Value] = {"rope.freq_base": full.theta}
    if family.names_vocabulary or full.rotary_dim != d.head_dim:
        values["rope.dimension_count"] = full.rotary_dim
    if len(d.rope_tables) > 1:
        local = d.rope_table("sliding").theta
        if local != (family.default_local_theta or full.theta):
            values["rope.freq_base_swa"] = local
    return values | _rope_values(full.scaling)


def _rope_values(scaling: RopeScaling) -> dict[str, Value]:
    if scaling.kind in ("default", "llama3"):  # llama3 is a tensor, see `derived_tensors`
        return {}
    if scaling.kind == "longrope":
        return {
            "rope.scaling.original_context_length": scaling.original_context,
            "rope.scaling.attn_factor": longrope_magnitude(scaling),
        }
    values: dict[str, Value] = {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor}
    if scaling.kind == "yarn":
        values["rope.scaling.original_context_length"] = scaling.original_context
        if scaling.attention_factor is not None:
            derived = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
            values["rope.scaling.attn_factor"] = scaling.attention_factor / derived
        for key, value, default in (
            ("yarn_beta_fast", scaling.beta_fast, 32.0),
            ("yarn_beta_slow", scaling.beta_slow, 1.0),
        ):
            if value != default:
                values[f"rope.scaling.{key}"] = value
    return values


def _check(values: dict[str, Value], description: ModelDescription) -> None:
    """Read the metadata back and compare it with the description."""
    d = description
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_telling_names(d), (1,))
    shapes |= expert_shapes(d)
    shapes[_EMBEDDING] = (d.vocab_size, d.hidden_size)
    shapes |= {f"layer {layer}": (1,) for layer in range(d.num_layers)}
    factors = derived_tensors(d)
    read = describe(
        Metadata(None, dict(values)),  # type: ignore[arg-type]
        shapes,
        "the GGUF",
        lambda name: tuple(factors.get(name, ())),
    )
    kinds = [table.scaling.kind for table in d.rope_tables[:1]]
    expected = d.with_rope_scaling("full", RopeScaling()) if "llama3" in kinds else d
    if "longrope" in kinds:
        expected = d.with_rope_scaling("full", _stated_longrope(d))
    differing = [name for name in differences(read, expected, _close) if name not in _NOT_COMPARED]
    if differing:
        raise CheckpointError(f"GGUF cannot express this model's {', '.join(differing)}", "choose a safetensors format")


def _telling_names(d: ModelDescription) -> Iterator[str]:
    """Tensors from whose presence the reader learns what the metadata does not say."""
    first, layer, mlp = "model.layers.0", d.layers[0], d.layers[0].feed_forward
    if mlp is None:
        yield from gguf_recurrent.telling_shapes(d)
        return
    present = {
        "model.norm.bias": d.norm_bias,
        _HEAD: not d.tie_embeddings,
        "lm_head.bias": d.head_bias,
        f"{first}.mlp.up_proj.bias": mlp.bias and not mlp.num_experts,
        f"{first}.post_attention_layernorm.weight": layer.norms in ("pre", "parallel_norms"),
    }
    present[f"{first}.mamba.norm.weight"] = any(
        isinstance(each, Recurrent) and each.norm != "" for each in layer.mixers
    )
    if layer.kind not in ("latent", "recurrent"):
        present |= {
            f"{first}.self_attn.q_proj.bias": layer.attention.qkv_bias,
            f"{first}.self_attn.o_proj.bias": layer.attention.output_bias,
            f"{first}.self_attn.q_norm.weight": bool(layer.attention.head_norms),
        }
    yield from (name for name, has in present.items() if has)


def _stated_longrope(d: ModelDescription) -> RopeScaling:
    """As a GGUF says it: the magnitude is a number of the file, the factor follows from the lengths."""
    scaling = d.rope_table("full").scaling
    factor = d.context_length / scaling.original_context
    return replace(scaling, factor=factor, attention_factor=longrope_magnitude(scaling))


def _close(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    return a == b
