"""Tensor names: GGUF's short ones <-> the canonical (Hugging Face) ones that architectures are written in.

A name that is not in the tables is passed through, so that the loader can report it as left over. Used by gguf.py and,
the other way, by gguf_export.py.
"""

from __future__ import annotations

import re

from tokenmill.checkpoint import gguf_latent

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
_LAYER_LATENT = _LAYER | gguf_latent.LAYER_NAMES
_LAYER_NAMES = {  # by architecture; the others have the plain table
    "gemma3": _LAYER_SANDWICH,
    "deepseek2": _LAYER_LATENT,
    "deepseek_v2": _LAYER_LATENT,
    "deepseek_v3": _LAYER_LATENT,
}
_BLOCK = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")


def canonical_name(architecture: str, name: str) -> str:
    """`blk.3.ffn_up.weight` -> `model.layers.3.mlp.up_proj.weight`."""
    layer_names = _LAYER_NAMES.get(architecture, _LAYER)
    if match := _BLOCK.fullmatch(name):
        layer, part, kind = match.groups()
        if part in layer_names:
            return f"model.layers.{int(layer)}.{layer_names[part]}.{kind}"
    stem, _, kind = name.rpartition(".")
    if stem in _TOP and kind in ("weight", "bias"):
        return f"{_TOP[stem]}.{kind}"
    return name


_CANONICAL_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)\.(weight|bias)")


def gguf_name(architecture: str, name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`: the inverse of `canonical_name`."""
    # Where two short names mean one weight, the later of the table is the one that this architecture's files use.
    layer_names = {ours: short for short, ours in _LAYER_NAMES.get(architecture, _LAYER).items()}
    if (match := _CANONICAL_LAYER.fullmatch(name)) and match[2] in layer_names:
        return f"blk.{int(match[1])}.{layer_names[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    top_names = {ours: short for short, ours in _TOP.items()}
    return f"{top_names[stem]}.{kind}" if stem in top_names and kind in ("weight", "bias") else name
