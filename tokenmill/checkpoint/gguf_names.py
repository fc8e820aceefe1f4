"""Tensor names: GGUF's short ones -> the canonical (Hugging Face) ones that architectures are written in.

A name that is not in the tables is passed through, so that the loader can report it as left over. Used by gguf.py.
"""

from __future__ import annotations

import re

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
_BLOCK = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")


def canonical_name(architecture: str, name: str) -> str:
    """`blk.3.ffn_up.weight` -> `model.layers.3.mlp.up_proj.weight`."""
    layer_names = _LAYER_SANDWICH if architecture == "gemma3" else _LAYER
    if match := _BLOCK.fullmatch(name):
        layer, part, kind = match.groups()
        if part in layer_names:
            return f"model.layers.{int(layer)}.{layer_names[part]}.{kind}"
    stem, _, kind = name.rpartition(".")
    if stem in _TOP and kind in ("weight", "bias"):
        return f"{_TOP[stem]}.{kind}"
    return name
