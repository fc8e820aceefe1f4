"""Tensor names: GGUF's short ones <-> the canonical (Hugging Face) ones that architectures are written in.

A name that is not in the tables is passed through, so that the loader can report it as left over. Used by gguf.py and,
the other way, by gguf_export.py.
"""

from __future__ import annotations

import re

from tokenmill.checkpoint.gguf_experts import ARCHITECTURES as EXPERT_ARCHITECTURES
from tokenmill.checkpoint.gguf_experts import LAYER_NAMES, NORM_NAMES, RENAMED_NORMS, TENSOR_NAMES

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma 3 norms the output of each half too, so "before the MLP" and "after attention" are two different norms.
_LAYER_SANDWICH = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER |= LAYER_NAMES
_LAYER_RENAMED = {short: ours for short, ours in _LAYER.items() if short != "ffn_norm"} | NORM_NAMES
# By architecture; the others have the plain table.
_LAYER_NAMES = {"gemma3": _LAYER_SANDWICH, **dict.fromkeys(RENAMED_NORMS, _LAYER_RENAMED)}
_STORED_AS = {ours: stored for stored, ours in EXPERT_ARCHITECTURES.items()}
# Mixtral's first files keep experts apart: blk.3.ffn_up.7.weight.
_SINGLE_EXPERT = re.compile(r"blk\.(\d{1,6})\.ffn_(gate|up|down)\.(\d{1,6})\.weight")
_BLOCK_TENSOR = re.compile(r"blk\.(\d{1,6})\.(.+)")
_BLOCK = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")


def canonical_name(architecture: str, name: str) -> str:
    """`blk.3.ffn_up.weight` -> `model.layers.3.mlp.up_proj.weight`."""
    layer_names = _LAYER_NAMES.get(architecture, _LAYER)
    if match := _SINGLE_EXPERT.fullmatch(name):
        layer, part, expert = match.groups()
        return f"model.layers.{int(layer)}.mlp.experts.{int(expert)}.{part}_proj.weight"
    if (match := _BLOCK_TENSOR.fullmatch(name)) and match[2] in TENSOR_NAMES:
        return f"model.layers.{int(match[1])}.{TENSOR_NAMES[match[2]]}"
    if match := _BLOCK.fullmatch(name):
        layer, part, kind = match.groups()
        if part in layer_names:
            return f"model.layers.{int(layer)}.{layer_names[part]}.{kind}"
    stem, _, kind = name.rpartition(".")
    if stem in _TOP and kind in ("weight", "bias"):
        return f"{_TOP[stem]}.{kind}"
    return name


_CANONICAL_TENSOR = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")
_CANONICAL_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)\.(weight|bias)")


def gguf_name(architecture: str, name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`: the inverse of `canonical_name`."""
    # Where two short names mean one weight, the later of the table is the one that this architecture's files use.
    stored_as = _STORED_AS.get(architecture, architecture)
    layer_names = {ours: short for short, ours in _LAYER_NAMES.get(stored_as, _LAYER).items()}
    whole = {ours: short for short, ours in TENSOR_NAMES.items()}
    if (match := _CANONICAL_TENSOR.fullmatch(name)) and match[2] in whole:
        return f"blk.{int(match[1])}.{whole[match[2]]}"
    if (match := _CANONICAL_LAYER.fullmatch(name)) and match[2] in layer_names:
        return f"blk.{int(match[1])}.{layer_names[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    top_names = {ours: short for short, ours in _TOP.items()}
    return f"{top_names[stem]}.{kind}" if stem in top_names and kind in ("weight", "bias") else name
