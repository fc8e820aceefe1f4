"""Which ggml type each tensor of a file gets: the mixes of llama.cpp (Q4_K_M and its like), as plain rules.

A mix has a default type; the output head, the value projections, the MLP's down projection and the attention output may
get more bits, some only in chosen layers. Rows that a type's block does not divide fall back to a neighbour. Works on
names and shapes alone, so that a file's size is known before anything is quantized. Called by export.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tokenmill.errors import unknown_name
from tokenmill.kernels.ggml_types import TYPES


@dataclass(frozen=True, slots=True)
class Mix:
    name: str
    file_type: int  # general.file_type in the file
    default: str
    is_plain: bool = False  # a float type: every matrix gets it

    @property
    def is_low_bit(self) -> bool:
        """Points of a grid, which want an importance, or three levels, which want a model trained for them."""
        return self.default.startswith(("IQ2", "IQ3", "TQ"))


_MIXES = (
    Mix("F32", 0, "F32", is_plain=True),
    Mix("F16", 1, "F16", is_plain=True),
    Mix("BF16", 32, "BF16", is_plain=True),
    Mix("Q4_0", 2, "Q4_0"),
    Mix("Q4_1", 3, "Q4_1"),
    Mix("Q5_0", 8, "Q5_0"),
    Mix("Q5_1", 9, "Q5_1"),
    Mix("Q8_0", 7, "Q8_0"),
    Mix("Q2_K", 10, "Q2_K"),
    Mix("Q3_K_S", 11, "Q3_K"),
    Mix("Q3_K_M", 12, "Q3_K"),
    Mix("Q3_K_L", 13, "Q3_K"),
    Mix("Q4_K_S", 14, "Q4_K"),
    Mix("Q4_K_M", 15, "Q4_K"),
    Mix("Q5_K_S", 16, "Q5_K"),
    Mix("Q5_K_M", 17, "Q5_K"),
    Mix("Q6_K", 18, "Q6_K"),
    Mix("IQ4_NL", 25, "IQ4_NL"),
    Mix("IQ4_XS", 30, "IQ4_XS"),
    Mix("IQ2_XXS", 19, "IQ2_XXS"),
    Mix("IQ2_XS", 20, "IQ2_XS"),
    Mix("IQ2_S", 28, "IQ2_XS"),
    Mix("IQ2_M", 29, "IQ2_S"),
    Mix("IQ3_XXS", 23, "IQ3_XXS"),
    Mix("IQ3_XS", 22, "IQ3_S"),
    Mix("IQ3_S", 26, "IQ3_S"),
    Mix("IQ3_M", 27, "IQ3_S"),
    Mix("TQ1_0", 36, "TQ1_0"),
    Mix("TQ2_0", 37, "TQ2_0"),
)
MIXES: dict[str, Mix] = {mix.name: mix for mix in _MIXES}

# Types with blocks of 32, for rows that 256 does not divide: at least as many bits.
_FALLBACKS = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "IQ4_XS": "IQ4_NL",
    "IQ2_XXS": "IQ4_NL",
    "IQ2_XS": "IQ4_NL",
    "IQ2_S": "IQ4_NL",
    "IQ3_XXS": "IQ4_NL",
    "IQ3_S": "IQ4_NL",
    "TQ1_0": "Q4_0",
    "TQ2_0": "Q4_0",
}
_TWO_BITS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M")
_LARGER_TWO_BITS = ("IQ2_S", "IQ2_M")
# What the head (or the embedding that is also the head) gets instead of Q6_K, and an embedding of its own.
_HEADS = {**dict.fromkeys(_TWO_BITS, "Q5_K"), "IQ3_XXS": "Q5_K"}
_EMBEDDINGS = {
    "IQ2_XXS": "Q2_K",
    "IQ2_XS": "Q2_K",
    "IQ2_S": "IQ3_S",
    "IQ2_M": "IQ3_S",
    "IQ3_XXS": "IQ3_S",
    "TQ1_0": "Q4_K",
    "TQ2_0": "Q4_K",
}
# The last four make the time steps and inputs of states.
_FLOAT = (
    "_norm.weight",
    "position_embd.weight",
    ".ffn_gate_inp.weight",
    ".ssm_conv1d.weight",
    ".ssm_x.weight",
    ".ssm_dt.weight",
    ".ssm_ba.weight",
)
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of the model that the rules depend on."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    has_output: bool  # false: the embedding is also the head
    has_importance: bool

    @property
    def queries_per_value(self) -> int:
        return self.num_heads // max(1, self.num_kv_heads)

    @property
    def is_70b(self) -> bool:
        """llama.cpp's name for 80 layers of grouped-query attention, whose few value rows are worth more bits."""
        return self.num_layers == 80 and self.queries_per_value > 1


def find_mix(name: str) -> Mix:
    if name.upper() not in MIXES:
        raise unknown_name("GGUF type", name, MIXES)
    return MIXES[name.upper()]


def choose_types(mix: Mix, shapes: Mapping[str, tuple[int, ...]], model: Shape) -> dict[str, str]:
    """GGUF tensor name -> type name, for every tensor. `shapes` are row-major: a row is the last dimension."""
    return {name: _choose(mix, name, shape, model) for name, shape in shapes.items()}


def is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Matrices only; norms, biases, rotary divisors, learned positions, routers, convolutions and time steps stay
    float32."""
    return len(shape) >= 2 and name.endswith(".weight") and not name.endswith(_FLOAT)


def _choose(mix: Mix, name: str, shape: tuple[int, ...], model: Shape) -> str:
    if not is_quantized(name, shape):
        return "F32"
    if mix.is_plain:
        return mix.default
    row = shape[-1]
    if name == "output.weight" or (name == "token_embd.weight" and not model.has_output):
        divides = row % TYPES[mix.default].block_size == 0
        return _fitting(_HEADS.get(mix.name, "Q6_K") if divides and mix.default != "Q8_0" else "Q8_0", row)
    if name == "token_embd.weight":
        return _fitting(_EMBEDDINGS.get(mix.name, mix.default), row)
    if match := _BLOCK.fullmatch(name):
        layer, part = int(match[1]), match[2]
        rule = {
            "attn_q": _query_type,
            "attn_k": _query_type,
            "attn_v": _value_type,
            "ffn_gate": _inner_type,
            "ffn_up": _inner_type,
            "ffn_down": _down_type,
            "ffn_down_exps": _down_type,
            "attn_output": _attention_output_type,
        }.get(part)
        if rule is not None:
            return _fitting(rule(mix, layer, model), row)
    return _fitting(mix.default, row)


def _fitting(type_name: str, row: int) -> str:
    if row % TYPES[type_name].block_size == 0:
        return type_name
    fallback = _FALLBACKS.get(type_name)
    return fallback if fallback and row % TYPES[fallback].block_size == 0 else "F16"


def _gets_more_bits(layer: int, num_layers: int) -> bool:
    """The first and last eighth of the layers, and every third in between."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _value_type(mix: Mix, layer: int, model: Shape) -> str:
    grouped = model.queries_per_value >= 4
    if mix.name in _TWO_BITS:
        return "Q4_K" if grouped else "IQ3_S" if mix.name in _LARGER_TWO_BITS else "Q2_K"
    chosen = mix.default
    if mix.name == "IQ3_M" or (mix.default.startswith("IQ3") and grouped):
        chosen = "Q4_K"
    elif mix.name == "IQ3_XXS" and not model.has_importance:
        chosen = "IQ3_S"
    elif mix.name == "Q2_K":
        chosen = "Q4_K" if grouped else "Q3_K"
    elif mix.name == "Q3_K_M":
        chosen = "Q5_K" if layer < 2 else "Q4_K"
    elif mix.name == "Q3_K_L" or (mix.name in ("IQ4_NL", "IQ4_XS") and grouped) or (mix.name == "Q4_K_S" and layer < 4):
        chosen = "Q5_K"
    elif mix.name in ("Q4_K_M", "Q5_K_M") and _gets_more_bits(layer, model.num_layers):
        chosen = "Q6_K"
    if model.is_70b and chosen in ("Q3_K", "Q4_K"):
        return "Q5_K"
    return chosen


def _down_type(mix: Mix, layer: int, model: Shape) -> str:
    is_early = layer < model.num_layers // 8
    if is_early and mix.name in _TWO_BITS:
        return "IQ3_S" if mix.name in _LARGER_TWO_BITS else "Q2_K"
    if mix.name == "IQ3_XXS" and not model.has_importance:
        return "Q4_K" if is_early else "Q3_K"
    if is_early and mix.name == "IQ3_M":
        return "Q4_K"
    if mix.name == "Q2_K":
        return "Q3_K"
    if mix.name == "Q3_K_M":
        return "Q5_K" if layer < model.num_layers // 16 else "Q4_K"
    if mix.name == "Q3_K_L":
        return "Q5_K"
    if mix.name in ("Q4_K_M", "Q5_K_M") and _gets_more_bits(layer, model.num_layers):
        return "Q6_K"
    if is_early and (mix.name == "Q4_K_S" or (mix.name in ("IQ4_NL", "IQ4_XS") and not model.has_importance)):
        return "Q5_K"
    if is_early and model.has_importance and mix.name in ("Q4_0", "Q5_0"):
        return "Q4_1" if mix.name == "Q4_0" else "Q5_1"
    return mix.default


def _attention_output_type(mix: Mix, _layer: int, _model: Shape) -> str:
    if mix.name in _LARGER_TWO_BITS or mix.name == "IQ3_XXS":
        return "IQ3_S"
    return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "IQ3_M": "Q4_K"}.get(mix.name, mix.default)


def _query_type(mix: Mix, _layer: int, _model: Shape) -> str:
    return {"IQ3_XS": "IQ3_XXS", "IQ3_XXS": "IQ2_S"}.get(mix.name, mix.default)


def _inner_type(mix: Mix, layer: int, model: Shape) -> str:
    in_the_middle = model.num_layers // 8 <= layer < 7 * model.num_layers // 8
    return "IQ3_XXS" if mix.name == "IQ3_XS" and in_the_middle else mix.default
