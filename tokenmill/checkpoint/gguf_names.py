"""Tensor names: GGUF's short ones <-> the canonical (Hugging Face) ones that architectures are written in.

A name that is not in the tables is passed through, so that the loader can report it as left over. Used by gguf.py and,
the other way, by gguf_export.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from tokenmill.checkpoint import gguf_hybrid, gguf_latent, gguf_recurrent
from tokenmill.checkpoint.gguf_experts import LAYER_NAMES as EXPERT_NAMES
from tokenmill.checkpoint.gguf_experts import TENSOR_NAMES
from tokenmill.checkpoint.gguf_families import FAMILIES, STORED_AS
from tokenmill.checkpoint.tensor_views import FUSED_GATE_UP, FUSED_QKV

_TOP = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.position_embeddings",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": FUSED_QKV,
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Where the output of each half is normed too, "before the MLP" and "after attention" are two different norms.
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED_MLP = {"ffn_up": FUSED_GATE_UP}
# Falcon-40B: the first norm is the MLP's, the second attention's.
SECOND_NORM = "blk.0.attn_norm_2.weight"
_TWO_NORMS = {"attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"}
# Mixtral's first files keep experts apart: blk.3.ffn_up.7.weight.
_SINGLE_EXPERT = re.compile(r"blk\.(\d{1,6})\.ffn_(gate|up|down)\.(\d{1,6})\.weight")
_BLOCK_TENSOR = re.compile(r"blk\.(\d{1,6})\.(.+)")
_CANONICAL_TENSOR = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")
_BLOCK = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")
_CANONICAL_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)\.(weight|bias)")


def layer_names(stored_as: str, names: Collection[str] = ()) -> dict[str, str]:
    """Short name -> canonical name of the parts of a layer, in files of this architecture that have these tensors."""
    family = FAMILIES.get(stored_as)
    table = _LAYER | EXPERT_NAMES
    if family is not None and family.norms in ("sandwich", "post"):
        table |= _SANDWICH
    if family is not None and family.fused_mlp:
        table |= _FUSED_MLP
    if family is not None and family.post_attention_norm:
        del table["ffn_norm"]
        table["post_attention_norm"] = "post_attention_layernorm"
    if family is not None and family.latent:
        table |= gguf_latent.LAYER_NAMES
    table |= gguf_recurrent.layer_names(stored_as)
    table |= gguf_hybrid.layer_names(stored_as, names)
    if SECOND_NORM in names:
        del table["ffn_norm"]
        table |= _TWO_NORMS
    return table


def _tensor_names(stored_as: str) -> dict[str, str]:
    return TENSOR_NAMES | gguf_recurrent.tensor_names(stored_as) | gguf_hybrid.tensor_names(stored_as)


def _top_names(stored_as: str) -> dict[str, str]:
    return {**_TOP, "output_norm": gguf_hybrid.final_norm(stored_as)}


def canonical_name(stored_as: str, name: str, names: Collection[str] = ()) -> str:
    """`blk.3.ffn_up.weight` -> `model.layers.3.mlp.up_proj.weight`. `names`: all tensors of the file."""
    if match := _SINGLE_EXPERT.fullmatch(name):
        layer, part, expert = match.groups()
        return f"model.layers.{int(layer)}.mlp.experts.{int(expert)}.{part}_proj.weight"
    whole = _tensor_names(stored_as)
    if (match := _BLOCK_TENSOR.fullmatch(name)) and match[2] in whole:
        return f"model.layers.{int(match[1])}.{whole[match[2]]}"
    if match := _BLOCK.fullmatch(name):
        layer, part, kind = match.groups()
        parts = layer_names(stored_as, names)
        if part in parts:
            return f"model.layers.{int(layer)}.{parts[part]}.{kind}"
    stem, _, kind = name.rpartition(".")
    top_names = _top_names(stored_as)
    if stem in top_names and kind in ("weight", "bias"):
        return f"{top_names[stem]}.{kind}"
    return name


def gguf_name(architecture: str, name: str, names: Collection[str] = ()) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`: the inverse of `canonical_name`."""
    stored_as = STORED_AS.get(architecture, architecture)
    parts = {ours: short for short, ours in layer_names(stored_as, names).items()}
    whole = {ours: short for short, ours in _tensor_names(stored_as).items()}
    if (match := _CANONICAL_TENSOR.fullmatch(name)) and match[2] in whole:
        return f"blk.{int(match[1])}.{whole[match[2]]}"
    if (match := _CANONICAL_LAYER.fullmatch(name)) and match[2] in parts:
        return f"blk.{int(match[1])}.{parts[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    top_names = {ours: short for short, ours in _top_names(stored_as).items()}
    return f"{top_names[stem]}.{kind}" if stem in top_names and kind in ("weight", "bias") else name
