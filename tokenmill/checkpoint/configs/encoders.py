"""Encoders: a config.json -> EncoderDescription, and the canonical names of their tensors.

One record covers the families: where positions come from, where the norms are, what the MLP is, which layers see only
a window, and which head a classifier has. Facts only: model/encoders/ computes by this record and knows no family.
Imports no torch; also read by the HTTP process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.checkpoint.fields import Fields
from tokenmill.errors import CheckpointError

_LABEL = "config.json"
_REMEDY = "correct config.json, or download the model again"
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "swiglu": "silu",
    "tanh": "tanh",
}


@dataclass(frozen=True, slots=True)
class EncoderDescription:
    """An encoder as it computes. Per-layer tuples have one entry per layer."""

    model_type: str
    hidden_size: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    context_length: int  # tokens of a text, with those that begin and end it
    norm_eps: float
    windows: tuple[int, ...]  # tokens that each token sees on either side; 0: all
    rope_thetas: tuple[float, ...]  # empty: positions are learned
    rotary_size: int = 0  # dimensions of a head that are rotated
    activation: str = "gelu"
    pre_norm: bool = False  # a norm before each half and one at the end; else one behind each half
    first_norm: bool = True  # whether the first attention of a pre-norm model has a norm of its own
    gated: bool = False  # MLP: activation(gate) * up
    num_token_types: int = 0
    marks_pairs: bool = False  # the second text of a pair has a type of its own
    first_position: int = 0  # row of the first token in the table of learned positions
    head: str = ""  # of a classifier: "tanh" (dense, tanh), "norm" (dense, activation, norm); "": none
    head_activation: str = "gelu"
    head_pooling: str = "cls"
    labels: tuple[str, ...] = ()  # of a classifier
    multi_label: bool = False  # labels do not exclude each other
    score_activation: str = ""  # that cross-encoders apply to their logits: "sigmoid" | "identity"; "": by the labels

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True)
class _Family:
    """What is fixed by the code of a model type. `prefix`: of its tensors below a task head."""

    prefix: str
    names: Mapping[str, str]  # pattern of a stored name, without .weight or .bias -> canonical name
    kind: str  # which reader of the config


_BERT_NAMES = {
    r"embeddings\.word_embeddings": "embeddings.tokens",
    r"embeddings\.position_embeddings": "embeddings.positions",
    r"embeddings\.token_type_embeddings": "embeddings.types",
    r"embeddings\.LayerNorm": "embeddings.norm",
    r"encoder\.layer\.(\d+)\.attention\.self\.query": r"layers.\1.q",
    r"encoder\.layer\.(\d+)\.attention\.self\.key": r"layers.\1.k",
    r"encoder\.layer\.(\d+)\.attention\.self\.value": r"layers.\1.v",
    r"encoder\.layer\.(\d+)\.attention\.output\.dense": r"layers.\1.out",
    r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm": r"layers.\1.attention_norm",
    r"encoder\.layer\.(\d+)\.intermediate\.dense": r"layers.\1.up",
    r"encoder\.layer\.(\d+)\.output\.dense": r"layers.\1.down",
    r"encoder\.layer\.(\d+)\.output\.LayerNorm": r"layers.\1.mlp_norm",
}
_ROBERTA_HEAD = {r"classifier\.dense": "head.dense", r"classifier\.out_proj": "head.out"}
_MODERN_NAMES = {
    r"embeddings\.tok_embeddings": "embeddings.tokens",
    r"embeddings\.norm": "embeddings.norm",
    r"layers\.(\d+)\.attn_norm": r"layers.\1.attention_norm",
    r"layers\.(\d+)\.attn\.Wqkv": r"layers.\1.qkv",
    r"layers\.(\d+)\.attn\.Wo": r"layers.\1.out",
    r"layers\.(\d+)\.mlp_norm": r"layers.\1.mlp_norm",
    r"layers\.(\d+)\.mlp\.Wi": r"layers.\1.gate_up",
    r"layers\.(\d+)\.mlp\.Wo": r"layers.\1.down",
    r"final_norm": "final_norm",
    r"head\.dense": "head.dense",
    r"head\.norm": "head.norm",
    r"classifier": "head.out",
}
_NOMIC_NAMES = {  # the published names, and those of transformers 5
    r"embeddings\.word_embeddings": "embeddings.tokens",
    r"embeddings\.token_type_embeddings": "embeddings.types",
    r"(?:emb_ln|embeddings\.LayerNorm)": "embeddings.norm",
    r"(?:encoder\.)?layers\.(\d+)\.attn\.Wqkv": r"layers.\1.qkv",
    r"layers\.(\d+)\.self_attn\.q_proj": r"layers.\1.q",
    r"layers\.(\d+)\.self_attn\.k_proj": r"layers.\1.k",
    r"layers\.(\d+)\.self_attn\.v_proj": r"layers.\1.v",
    r"(?:encoder\.)?layers\.(\d+)\.(?:attn\.out_proj|self_attn\.o_proj)": r"layers.\1.out",
    r"(?:encoder\.)?layers\.(\d+)\.(?:norm1|post_attention_layernorm)": r"layers.\1.attention_norm",
    r"(?:encoder\.)?layers\.(\d+)\.(?:norm2|post_mlp_layernorm)": r"layers.\1.mlp_norm",
    r"(?:encoder\.)?layers\.(\d+)\.mlp\.(?:fc11|up_proj)": r"layers.\1.up",
    r"(?:encoder\.)?layers\.(\d+)\.mlp\.(?:fc12|gate_proj)": r"layers.\1.gate",
    r"(?:encoder\.)?layers\.(\d+)\.mlp\.(?:fc2|down_proj)": r"layers.\1.down",
}
_BERT = _Family("bert.", _BERT_NAMES | {r"pooler\.dense": "head.dense", "classifier": "head.out"}, "bert")
_ROBERTA = _Family("roberta.", _BERT_NAMES | _ROBERTA_HEAD, "roberta")
_FAMILIES = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "modernbert": _Family("model.", _MODERN_NAMES, "modern"),
    "nomic_bert": _Family("nomic_bert.", _NOMIC_NAMES, "nomic"),
}
_SUFFIXES = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a family that is described here."""
    family = config.get("model_type")
    return isinstance(family, str) and family in _FAMILIES


def canonical_name(model_type: str, stored: str) -> str | None:
    """The canonical name of a stored tensor; None for what an encoder does not compute with (heads of pre-training)."""
    family = _FAMILIES[model_type]
    base, _, suffix = stored.removeprefix(family.prefix).rpartition(".")
    if suffix not in _SUFFIXES:
        return None
    for pattern, name in family.names.items():
        match = re.fullmatch(pattern, base)
        if match:
            return f"{match.expand(name)}.{_SUFFIXES[suffix]}"
    return None


def describe_encoder(config: Mapping[str, Any]) -> EncoderDescription:
    fields = Fields(config, _LABEL, _REMEDY)
    model_type = fields.text("model_type", "")
    if model_type not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise CheckpointError(f"{_LABEL}: '{model_type}' is not an encoder that is supported", f"supported: {known}")
    reader = {"bert": _bert, "roberta": _bert, "modern": _modern, "nomic": _nomic}[_FAMILIES[model_type].kind]
    values = {"model_type": model_type, **reader(fields), **_classifier(fields, _FAMILIES[model_type].kind)}
    description = EncoderDescription(**values)
    if description.hidden_size % description.num_heads:
        raise fields.error(f"{description.hidden_size} dimensions are not {description.num_heads} heads")
    return description


def _bert(fields: Fields) -> dict[str, Any]:
    if fields.text("position_embedding_type", "absolute") != "absolute":
        raise fields.error("relative positions are not supported", "use a model with absolute positions")
    if fields.flag("is_decoder", False):
        raise fields.error("'is_decoder' is true: this is no encoder", "use an encoder")
    num_rows = fields.integer("max_position_embeddings", 512)
    is_roberta = _FAMILIES[fields.text("model_type", "")].kind == "roberta"
    first = fields.integer("pad_token_id", 1, low=0) + 1 if is_roberta else 0  # its positions begin behind padding
    return {
        "hidden_size": fields.integer("hidden_size", 768),
        "num_heads": fields.integer("num_attention_heads", 12),
        "intermediate_size": fields.integer("intermediate_size", 3072),
        "vocab_size": fields.integer("vocab_size", 30522),
        "context_length": num_rows - first,
        "norm_eps": fields.number("layer_norm_eps", 1e-12),
        "windows": (0,) * fields.integer("num_hidden_layers", 12),
        "rope_thetas": (),
        "activation": _activation(fields, "hidden_act", "gelu"),
        "num_token_types": fields.integer("type_vocab_size", 2, low=0),
        "marks_pairs": not is_roberta and fields.integer("type_vocab_size", 2, low=0) > 1,
        "first_position": first,
    }


def _modern(fields: Fields) -> dict[str, Any]:
    num_layers = fields.integer("num_hidden_layers", 22)
    period = fields.integer("global_attn_every_n_layers", 3)
    usual = ["sliding_attention" if number % period else "full_attention" for number in range(num_layers)]
    kinds = fields.raw("layer_types") or usual
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.wrong("layer_types", kinds)
    rope = Fields(fields.mapping("rope_parameters"), _LABEL, _REMEDY)
    thetas = {}
    for kind, key, default in (
        ("full_attention", "global_rope_theta", 160_000.0),
        ("sliding_attention", "local_rope_theta", 10_000.0),
    ):
        own = Fields(rope.mapping(kind), _LABEL, _REMEDY)
        if own.text("rope_type", "default") != "default":
            raise fields.error(f"rope type '{own.text('rope_type', '')}' of an encoder is not supported")
        thetas[kind] = own.number("rope_theta", fields.number(key, default))
    if any(kind not in thetas for kind in kinds):
        raise fields.wrong("layer_types", kinds)
    window = fields.integer("local_attention", 128) // 2
    hidden_size, num_heads = fields.integer("hidden_size", 768), fields.integer("num_attention_heads", 12)
    return {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "intermediate_size": fields.integer("intermediate_size", 1152),
        "vocab_size": fields.integer("vocab_size", 50368),
        "context_length": fields.integer("max_position_embeddings", 8192),
        "norm_eps": fields.number("norm_eps", 1e-5),
        "windows": tuple(0 if kind == "full_attention" else window for kind in kinds),
        "rope_thetas": tuple(thetas[kind] for kind in kinds),
        "rotary_size": hidden_size // num_heads,
        "activation": _activation(fields, "hidden_activation", "gelu"),
        "pre_norm": True,
        "first_norm": False,
        "gated": True,
    }


def _nomic(fields: Fields) -> dict[str, Any]:
    """Keys as published (GPT-2's names), or as transformers 5 writes them."""
    for key in ("prenorm", "use_rms_norm", "rotary_emb_interleaved", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"):
        if fields.flag(key, False):
            raise fields.error(f"'{key}' is true, which is not supported for this encoder")
    num_layers = fields.integer("n_layer", fields.integer("num_hidden_layers", 12))
    hidden_size = fields.integer("n_embd", fields.integer("hidden_size", 768))
    num_heads = fields.integer("n_head", fields.integer("num_attention_heads", 12))
    rope = Fields(fields.mapping("rope_parameters"), _LABEL, _REMEDY)
    theta = rope.number("rope_theta", fields.number("rotary_emb_base", 1000.0))
    fraction = fields.number("rotary_emb_fraction", 1.0)
    return {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "intermediate_size": fields.integer("n_inner", fields.integer("intermediate_size", 3072)),
        "vocab_size": fields.integer("vocab_size", 30528),
        "context_length": fields.integer("n_positions", fields.integer("max_position_embeddings", 2048)),
        "norm_eps": fields.number("layer_norm_epsilon", fields.number("layer_norm_eps", 1e-12)),
        "windows": (0,) * num_layers,
        "rope_thetas": (theta,) * num_layers,
        "rotary_size": int(fraction * (hidden_size // num_heads)),
        "activation": _activation(fields, "activation_function", fields.text("hidden_act", "silu")),
        "gated": True,
        "num_token_types": fields.integer("type_vocab_size", 2, low=0),
        "marks_pairs": fields.integer("type_vocab_size", 2, low=0) > 1,
    }


def _activation(fields: Fields, key: str, default: str) -> str:
    name = fields.text(key, default)
    if name not in _ACTIVATIONS:
        raise fields.error(f"activation '{name}' is not supported", f"supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _classifier(fields: Fields, kind: str) -> dict[str, Any]:
    """The head of a sequence classifier, if the file says that it has one."""
    architectures = fields.raw("architectures") or []
    if not any(str(name).endswith("ForSequenceClassification") for name in architectures):
        return {}
    if kind == "nomic":
        raise fields.error("classifiers of this encoder are not supported", "use it for embeddings")
    names = fields.mapping("id2label")
    labels = tuple(str(names.get(str(n), f"LABEL_{n}")) for n in range(len(names) or fields.integer("num_labels", 2)))
    own = Fields(fields.mapping("sentence_transformers"), _LABEL, _REMEDY)
    stated = own.text("activation_fn", fields.text("sbert_ce_default_activation_function", ""))
    return {
        "head": "norm" if kind == "modern" else "tanh",
        "head_activation": _activation(fields, "classifier_activation", "gelu"),
        "head_pooling": fields.text("classifier_pooling", "cls"),
        "labels": labels,
        "multi_label": fields.text("problem_type", "") == "multi_label_classification",
        "score_activation": stated.rpartition(".")[2].lower(),
    }
