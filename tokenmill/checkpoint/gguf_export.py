"""Any checkpoint as a GGUF: its metadata, and which tensors the file has, under which names and in which shapes.

From a GGUF the metadata is copied byte for byte. From a Hugging Face directory it is made from the description and the
tokenizer, read back by our own reader and compared, so that a model GGUF cannot describe is refused. Knows nothing of
quantization types. Called by quantize/ggml/export.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.description import ModelDescription, RopeScaling
from tokenmill.checkpoint.gguf import GGUFCheckpoint
from tokenmill.checkpoint.gguf_description import describe
from tokenmill.checkpoint.gguf_header import read_gguf_raw_pairs
from tokenmill.checkpoint.gguf_metadata import Metadata
from tokenmill.checkpoint.gguf_names import gguf_name
from tokenmill.checkpoint.gguf_vocabulary import vocabulary_values
from tokenmill.checkpoint.gguf_writer import Value, pack_value
from tokenmill.checkpoint.hf_export import ROPE_DIVISORS
from tokenmill.checkpoint.rope_divisors import llama3_divisors
from tokenmill.errors import CheckpointError

QUANTIZATION_VERSION = 2
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# What the layout of the weights or the tokenizer says instead.
_NOT_COMPARED = ("bos_id", "eos_ids", "name", "rope_interleaved", "norm_offset")
_SCALING_FIELDS = tuple(field.name for field in fields(RopeScaling))
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
    tensors = [ExportedTensor(gguf_name(architecture, name), name, shapes[name]) for name in names]
    if checkpoint.description.rope_scaling.kind == "llama3":
        tensors.append(ExportedTensor(ROPE_DIVISORS, "", (checkpoint.description.head_dim // 2,)))
    if untied_output and _HEAD not in shapes:
        tensors.append(ExportedTensor(gguf_name(architecture, _HEAD), _EMBEDDING, shapes[_EMBEDDING]))
    return tensors


def rope_divisors(description: ModelDescription) -> list[float]:
    """What GGUF stores in place of llama3's four numbers: a divisor for each rotary frequency."""
    size, theta = description.head_dim, description.rope_theta
    wavelengths = [2 * math.pi * theta ** (2 * place / size) for place in range(size // 2)]
    return llama3_divisors(description.rope_scaling, wavelengths)


def _place(name: str) -> tuple[int, int, str]:
    """Embedding, layers in order, final norm, head."""
    if name.startswith("model.layers."):
        return 1, int(name.split(".")[2]), name
    return (0 if name == _EMBEDDING else 2 if name != _HEAD else 3), 0, name


def _model_values(checkpoint: Checkpoint) -> dict[str, Value]:
    description = checkpoint.description
    architecture = description.architecture
    values: dict[str, Value] = {"general.architecture": architecture, "general.type": "model"}
    if description.name:
        values["general.name"] = description.name.rstrip("/").rpartition("/")[2]
    values |= {f"{architecture}.{key}": value for key, value in _architecture_values(description).items()}
    values |= vocabulary_values(checkpoint.path, description.vocab_size)
    _check(values, description)
    return values


def _architecture_values(d: ModelDescription) -> dict[str, Value]:
    values: dict[str, Value] = {
        "block_count": d.num_layers,
        "context_length": d.context_length,
        "embedding_length": d.hidden_size,
        "feed_forward_length": d.intermediate_size,
        "attention.head_count": d.num_heads,
        "attention.head_count_kv": d.num_kv_heads,
        "attention.layer_norm_rms_epsilon": d.norm_eps,
        "rope.freq_base": d.rope_theta,
    }
    if d.architecture == "llama":
        values |= {"vocab_size": d.vocab_size, "rope.dimension_count": d.head_dim}
    if d.architecture in ("qwen3", "gemma3") or d.head_dim * d.num_heads != d.hidden_size:
        values |= {"attention.key_length": d.head_dim, "attention.value_length": d.head_dim}
    if d.sliding_window:
        values["attention.sliding_window"] = d.sliding_window
    if d.architecture == "gemma3":
        period = tuple("full" if (layer + 1) % 6 == 0 else "sliding" for layer in range(d.num_layers))
        if d.layer_kinds != period:
            values["attention.sliding_window_pattern"] = [kind == "sliding" for kind in d.layer_kinds]
        if d.local_rope_theta not in (None, 1e4):
            values["rope.freq_base_swa"] = float(d.local_rope_theta or 0)
        if d.attention_softcap:
            values["attn_logit_softcapping"] = d.attention_softcap
        if d.logit_softcap:
            values["final_logit_softcapping"] = d.logit_softcap
    return values | _rope_values(d.rope_scaling)


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
    """The metadata must say what the description says, to the reader that will open the file."""
    first = "model.layers.0"
    d = description
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (d.vocab_size, d.hidden_size)}
    flags = {"self_attn.q_proj": d.qkv_bias, "self_attn.o_proj": d.output_bias, "mlp.up_proj": d.mlp_bias}
    shapes |= {f"{first}.{part}.bias": (1,) for part, present in flags.items() if present}
    shapes |= {f"layer {layer}": (1,) for layer in range(d.num_layers)}
    if not d.tie_embeddings:
        shapes[_HEAD] = shapes[_EMBEDDING]
    read = describe(Metadata(None, dict(values)), shapes, "the GGUF")  # type: ignore[arg-type]
    scaling = RopeScaling() if d.rope_scaling.kind == "llama3" else d.rope_scaling
    wanted = replace(d, rope_scaling=scaling)
    differing = [
        field.name
        for field in fields(ModelDescription)
        if field.name not in _NOT_COMPARED and not _close(getattr(read, field.name), getattr(wanted, field.name))
    ]
    if differing:
        raise CheckpointError(
            f"GGUF has no way to say this model's {', '.join(differing)}", "choose a safetensors format"
        )


def _close(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    if isinstance(a, RopeScaling) and isinstance(b, RopeScaling):
        return all(_close(getattr(a, name), getattr(b, name)) for name in _SCALING_FIELDS)
    return a == b
