"""Any checkpoint as a GGUF: its metadata, and which tensors the file has, under which names and in which shapes.

From a GGUF the metadata is copied byte for byte. From a Hugging Face directory it is made from the description and the
tokenizer, read back by our own reader and compared, so that a model GGUF cannot describe is refused. Knows nothing of
quantization types. Called by quantize/ggml/export.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokenmill.checkpoint import gguf_latent
from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.description import ModelDescription, RopeScaling, differences
from tokenmill.checkpoint.gguf import GGUFCheckpoint
from tokenmill.checkpoint.gguf_description import describe
from tokenmill.checkpoint.gguf_header import read_gguf_raw_pairs
from tokenmill.checkpoint.gguf_metadata import Metadata
from tokenmill.checkpoint.gguf_names import gguf_name
from tokenmill.checkpoint.gguf_vocabulary import vocabulary_values
from tokenmill.checkpoint.gguf_writer import Value, pack_value
from tokenmill.checkpoint.hf_export import ROPE_DIVISORS
from tokenmill.checkpoint.mixers import Attention
from tokenmill.checkpoint.rope_divisors import llama3_divisors
from tokenmill.errors import CheckpointError

QUANTIZATION_VERSION = 2
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# What the layout of the weights or the tokenizer says instead.
_NOT_COMPARED = ("bos_id", "eos_ids", "name", "rope_interleaved", "norm_offset", "vision_parameters")
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """`source` is the canonical name to read from; empty for the rotary divisors, which follow from the config."""

    name: str  # in the file
    source: str
    shape: tuple[int, ...]


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
    architecture = checkpoint.description.architecture
    names = list(shapes)
    if not isinstance(checkpoint, GGUFCheckpoint):
        names.sort(key=_place)
    tensors = []
    for name in names:
        parts = gguf_latent.exported(name, checkpoint.description) or [(name, shapes[name])]
        tensors += [ExportedTensor(gguf_name(architecture, part), name, shape) for part, shape in parts]
    table = checkpoint.description.rope_table("full")
    if table.scaling.kind == "llama3":
        tensors.append(ExportedTensor(ROPE_DIVISORS, "", (table.rotary_dim // 2,)))
    if untied_output and _HEAD not in shapes:
        tensors.append(ExportedTensor(gguf_name(architecture, _HEAD), _EMBEDDING, shapes[_EMBEDDING]))
    return tensors


def rope_divisors(description: ModelDescription) -> list[float]:
    """What GGUF stores in place of llama3's four numbers: a divisor for each rotary frequency."""
    table = description.rope_table("full")
    size = table.rotary_dim
    wavelengths = [2 * math.pi * table.theta ** (2 * pair / size) for pair in range(size // 2)]
    return llama3_divisors(table.scaling, wavelengths)


def _place(name: str) -> tuple[int, int, str]:
    """Embedding, layers in order, final norm, head."""
    if name.startswith("model.layers."):
        return 1, int(name.split(".")[2]), name
    return (0 if name == _EMBEDDING else 2 if name != _HEAD else 3), 0, name


def _model_values(checkpoint: Checkpoint) -> dict[str, Value]:
    description = checkpoint.description
    architecture = gguf_latent.STORED_AS if "latent" in description.layer_kinds else description.architecture
    values: dict[str, Value] = {"general.architecture": architecture, "general.type": "model"}
    if description.name:
        values["general.name"] = description.name.rstrip("/").rpartition("/")[2]
    values |= {f"{architecture}.{key}": value for key, value in _architecture_values(description).items()}
    values |= vocabulary_values(checkpoint.path, description.vocab_size)
    _check(values, description)
    return values


def _architecture_values(d: ModelDescription) -> dict[str, Value]:
    full = d.rope_table("full")
    values: dict[str, Value] = {
        "block_count": d.num_layers,
        "context_length": d.context_length,
        "embedding_length": d.hidden_size,
        "feed_forward_length": d.intermediate_size,
        "attention.head_count": d.num_heads,
        "attention.head_count_kv": d.num_kv_heads,
        "attention.layer_norm_rms_epsilon": d.norm_eps,
        "rope.freq_base": full.theta,
    }
    style = _STYLES.get(d.architecture, _Style())
    if style.names_vocabulary:
        values |= {"vocab_size": d.vocab_size, "rope.dimension_count": full.rotary_dim}
    if "latent" in d.layer_kinds:
        return values | gguf_latent.values(d) | _rope_values(full.scaling)
    if style.names_head_size or d.head_dim * d.num_heads != d.hidden_size:
        values |= {"attention.key_length": d.head_dim, "attention.value_length": d.head_dim}
    if d.sliding_window:
        values["attention.sliding_window"] = d.sliding_window
    if style.sliding_period:
        values |= _mixed_values(d, style.sliding_period)
    return values | _rope_values(full.scaling)


@dataclass(frozen=True, slots=True)
class _Style:
    """Which keys converters write for an architecture beyond those that all have."""

    names_vocabulary: bool = False
    names_head_size: bool = False
    sliding_period: int = 0  # every n-th layer is full unless a pattern says otherwise


_STYLES = {
    "llama": _Style(names_vocabulary=True),
    "qwen3": _Style(names_head_size=True),
    "gemma3": _Style(names_head_size=True, sliding_period=6),
}


def _mixed_values(d: ModelDescription, period: int) -> dict[str, Value]:
    """Full and sliding layers in one model, with a rotary table each."""
    values: dict[str, Value] = {}
    usual = tuple("full" if (layer + 1) % period == 0 else "sliding" for layer in range(d.num_layers))
    if d.layer_kinds != usual:
        values["attention.sliding_window_pattern"] = [kind == "sliding" for kind in d.layer_kinds]
    local = d.rope_table("sliding")
    if local.theta != 1e4:
        values["rope.freq_base_swa"] = float(local.theta)
    if d.attention_softcap:
        values["attn_logit_softcapping"] = d.attention_softcap
    if d.logit_softcap:
        values["final_logit_softcapping"] = d.logit_softcap
    return values


def _rope_values(scaling: RopeScaling) -> dict[str, Value]:
    if scaling.kind in ("default", "llama3"):  # llama3 is a tensor, see `rope_divisors`
        return {}
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
    first = "model.layers.0"
    d = description
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (d.vocab_size, d.hidden_size)}
    (attention, *_), mlp = d.layers[0].mixers, d.layers[0].feed_forward
    assert mlp is not None
    flags = {"mlp.up_proj": mlp.bias}
    if isinstance(attention, Attention):
        flags |= {"self_attn.q_proj": attention.qkv_bias, "self_attn.o_proj": attention.output_bias}
    shapes |= {f"{first}.{part}.bias": (1,) for part, present in flags.items() if present}
    shapes |= {f"layer {layer}": (1,) for layer in range(d.num_layers)}
    if not d.tie_embeddings:
        shapes[_HEAD] = shapes[_EMBEDDING]
    read = describe(Metadata(None, dict(values)), shapes, "the GGUF")  # type: ignore[arg-type]
    scaling = d.rope_table("full").scaling
    expected = d.with_rope_scaling("full", RopeScaling()) if scaling.kind == "llama3" else d
    differing = [name for name in differences(read, expected, _close) if name not in _NOT_COMPARED]
    if differing:
        raise CheckpointError(f"GGUF cannot express this model's {', '.join(differing)}", "choose a safetensors format")


def _close(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    return a == b
