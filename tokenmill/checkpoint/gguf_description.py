"""GGUF metadata -> ModelDescription: which keys each architecture uses, which defaults, which variants we refuse.

The facts follow llama.cpp, which is what GGUF files are written for. Sees tensor shapes only to learn what the
metadata does not say (vocabulary size, biases, tied embeddings). Used by gguf.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tokenmill.checkpoint import gguf_latent
from tokenmill.checkpoint.description import FeedForward, LayerDescription, ModelDescription, RopeScaling, RopeTable
from tokenmill.checkpoint.fields import UNSUPPORTED, Fields, shown
from tokenmill.checkpoint.gguf_metadata import Metadata
from tokenmill.checkpoint.mapped_file import DAMAGED
from tokenmill.checkpoint.mixers import Attention, Mixer
from tokenmill.errors import CheckpointError

# GGUF name -> our architecture. Mistral is stored as llama.
ARCHITECTURES = {
    "llama": "llama",
    "mistral3": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    gguf_latent.STORED_AS: "deepseek_v3",
}
_INTERLEAVED = ("llama", "mistral3")  # their q and k rows are reordered when converted to GGUF
_HEAD_NORMS = ("qwen3", "gemma3")
_FIRST = "model.layers.0"
_GEMMA3_27B_LAYERS = 62  # the one size whose query scale is not from the head size, and metadata does not say so
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


def describe(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], label: str) -> ModelDescription:
    """`shapes` are those of the tensors, by canonical name."""
    stored_as = read_architecture(metadata, label)
    fields = Fields(metadata, label, DAMAGED, prefix=f"{stored_as}.")
    num_layers = fields.integer("block_count")
    if num_layers > len(shapes):
        raise fields.error(f"{num_layers} layers but only {len(shapes)} tensors")
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    vocab_size = _vocab_size(fields, shapes, hidden_size)
    latent = gguf_latent.read_mixer(fields) if stored_as == gguf_latent.STORED_AS else None
    head_dim = latent.rope_dim if latent else fields.integer("attention.key_length", hidden_size // num_heads)
    num_kv_heads = fields.integer("attention.head_count_kv", num_heads)
    if head_dim < 1 or num_heads % num_kv_heads:
        raise fields.error(f"{num_heads} heads and {num_kv_heads} KV heads over {hidden_size} do not fit")
    _refuse_variants(fields, latent.kv_rank if latent else head_dim, head_dim)
    window, kinds = _layer_kinds(fields, stored_as, num_layers)
    bos_id, eos_ids = _token_ids(metadata, vocab_size, label)
    name = metadata.get("general.name")
    theta = fields.number("rope.freq_base", 1e6 if stored_as == "gemma3" else 1e4, low=1.0)
    attention = Attention(
        num_heads,
        num_kv_heads,
        head_dim,
        head_dim,
        qkv_bias=f"{_FIRST}.self_attn.q_proj.bias" in shapes,
        output_bias=f"{_FIRST}.self_attn.o_proj.bias" in shapes,
        head_norms="head" if stored_as in _HEAD_NORMS else "",
    )
    mlp = FeedForward(fields.integer("feed_forward_length"), bias=f"{_FIRST}.mlp.up_proj.bias" in shapes)
    mixers: dict[str, Mixer] = {"full": latent or attention, "sliding": replace(attention, window=window)}
    description = ModelDescription(
        architecture=gguf_latent.architecture_of(fields) if latent else ARCHITECTURES[stored_as],
        model_type=stored_as,
        hidden_size=hidden_size,
        layers=tuple(LayerDescription((mixers[kind],), mlp) for kind in kinds),
        vocab_size=vocab_size,
        context_length=fields.integer("context_length"),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_tables=(RopeTable("full", head_dim, theta, _rope_scaling(fields, latent is not None)),),
        rope_interleaved=stored_as in _INTERLEAVED,
        tie_embeddings="lm_head.weight" not in shapes,
        bos_id=bos_id,
        eos_ids=eos_ids,
        name=name if isinstance(name, str) else "",
    )
    return _with_gemma(description, fields) if stored_as == "gemma3" else description


def _with_gemma(description: ModelDescription, fields: Fields) -> ModelDescription:
    """What only Gemma has. The + 1 of its norms is already in the weights of a GGUF."""
    size = description.head_dim
    if description.num_layers == _GEMMA3_27B_LAYERS:
        size = max(description.hidden_size // description.num_heads, 1)
    local = RopeTable("sliding", description.head_dim, fields.number("rope.freq_base_swa", 1e4, low=1.0))
    softcap = fields.number("attn_logit_softcapping", 0.0)

    def changed(layer: LayerDescription) -> LayerDescription:
        attention, mlp = layer.attention, layer.feed_forward
        assert mlp is not None
        rope = "sliding" if attention.window else "full"
        attention = replace(attention, scale=size**-0.5, softcap=softcap, rope=rope)
        return LayerDescription((attention,), replace(mlp, activation="gelu_tanh"), "sandwich")

    return replace(
        description,
        layers=tuple(map(changed, description.layers)),
        rope_tables=(*description.rope_tables, local),
        embedding_scale=math.sqrt(description.hidden_size),
        logit_softcap=fields.number("final_logit_softcapping", 0.0),
        overflows_float16=True,
    )


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


def _refuse_variants(fields: Fields, value_dim: int, head_dim: int) -> None:
    """Keys that change the computation in ways the description cannot express. `value_dim`: what is kept of a value."""
    if fields.integer("expert_count", 0, low=0) > 0:
        raise fields.error("it is a mixture of experts", UNSUPPORTED)
    expanded = value_dim != head_dim and fields.raw("attention.key_length_mla") is None  # an older latent file
    if fields.integer("attention.value_length", value_dim) != value_dim and not expanded:
        raise fields.error("keys and values have different sizes", UNSUPPORTED)
    if fields.integer("rope.dimension_count", head_dim) != head_dim:
        raise fields.error("only a part of each head is rotated", UNSUPPORTED)
    if fields.number("attention.temperature_scale", 0.0) > 0:
        raise fields.error("it scales attention by position", UNSUPPORTED)
    if fields.raw("attention.causal") is False:
        raise fields.error("its attention is not causal", "only decoder models are supported")


def _layer_kinds(fields: Fields, stored_as: str, num_layers: int) -> tuple[int, tuple[str, ...]]:
    """Window and kind of each layer. Qwen files carry a window that their models do not use."""
    window = fields.integer("attention.sliding_window", 0, low=0)
    if window == 0 or stored_as in ("qwen2", "qwen3"):
        return 0, ("full",) * num_layers
    if stored_as != "gemma3":
        return window, ("sliding",) * num_layers
    pattern = fields.raw("attention.sliding_window_pattern")
    if isinstance(pattern, list):  # newer files: for each layer, whether it slides
        if len(pattern) != num_layers:
            raise fields.error(f"the sliding window pattern has {len(pattern)} entries for {num_layers} layers")
        return window, tuple("sliding" if slides else "full" for slides in pattern)
    period = fields.integer("attention.sliding_window_pattern", 6)
    return window, tuple("full" if (layer + 1) % period == 0 else "sliding" for layer in range(num_layers))


def _rope_scaling(fields: Fields, is_latent: bool = False) -> RopeScaling:
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
