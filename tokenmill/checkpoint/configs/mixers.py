"""The mixer records of a config.json: heads and their sizes, latent ranks, sizes of recurrent states."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.checkpoint.configs.families import Family
from tokenmill.checkpoint.description import RopeTable
from tokenmill.checkpoint.fields import Fields
from tokenmill.checkpoint.mixers import Attention, LatentAttention, Mixer, Recurrent


def head_sizes(text: Fields, family: Family, hidden_size: int, num_heads: int) -> tuple[int, int]:
    """(KV heads, head size)."""
    default = 1 if text.flag("multi_query", False) else family.num_kv_heads or num_heads
    num_kv_heads = text.integer("num_key_value_heads", default)
    if num_heads % num_kv_heads:
        raise text.error(f"{num_heads} heads cannot share {num_kv_heads} KV heads")
    if family.head_dim is None and text.raw("head_dim") is None and hidden_size % num_heads:
        raise text.error(f"hidden size {hidden_size} is not a multiple of {num_heads} heads")
    head_dim = text.integer("head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise text.error(f"head size {head_dim} is odd")
    return num_kv_heads, head_dim


def mixers_by_kind(
    text: Fields, family: Family, hidden_size: int, kinds: set[str], window: int, tables: tuple[RopeTable, ...]
) -> dict[str, tuple[Mixer, ...]]:
    """For each kind of layer that occurs, its mixers."""
    result: dict[str, tuple[Mixer, ...]] = {}
    recurrent = (_recurrent(text, hidden_size),) if kinds & {"recurrent", "both"} else ()
    for kind in sorted(kinds):
        if kind == "recurrent":
            result[kind] = recurrent
            continue
        if text.raw("kv_lora_rank"):
            result[kind] = (_latent(text),)
            continue
        attention = _attention(text, family, hidden_size)
        if kind == "sliding":
            own_table = any(table.name == "sliding" for table in tables)
            attention = replace(attention, window=window, rope="sliding" if own_table else attention.rope)
        elif kind == "chunked":
            attention = replace(attention, chunk=text.integer("attention_chunk_size"))
        if family.rope_layers == "sliding" and kind != "sliding":
            attention = replace(attention, rope="")
        result[kind] = (attention, *recurrent) if kind == "both" else (attention,)
    return result


def rotates(text: Fields, family: Family, layer: int) -> bool:
    """Whether a layer rotates its queries and keys. In `no_rope_layers` a 1 means that it does."""
    if family.rope_layers != "listed":
        return True
    listed = text.integers("no_rope_layers")
    if layer < len(listed):
        return bool(listed[layer])
    return (layer + 1) % text.integer("no_rope_layer_interval", 4) != 0


def _attention(text: Fields, family: Family, hidden_size: int) -> Attention:
    num_heads = text.integer("num_attention_heads", dict(family.sizes).get("num_attention_heads"))
    num_kv_heads, head_dim = head_sizes(text, family, hidden_size, num_heads)
    bias = text.flag("attention_bias", False)
    return Attention(
        num_heads,
        num_kv_heads,
        head_dim,
        head_dim,
        rope="full" if family.positions == "rope" else "",
        scale=_scale(text, family),
        softcap=text.number("attn_logit_softcapping", 0.0),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        head_norms=family.head_norms or (family.optional_head_norms if text.flag("use_qk_norm", False) else ""),
        sinks=family.sinks,
        output_gate=text.flag("attn_output_gate", family.output_gate),
        causal=not text.flag("use_bidirectional_attention", False),
    )


def _scale(text: Fields, family: Family) -> float | None:
    if text.raw("attention_multiplier") is not None:  # Granite
        return text.number("attention_multiplier", low=1e-9)
    if family.query_scalar is None and text.raw("query_pre_attn_scalar") is None:
        return None
    return float(text.number("query_pre_attn_scalar", family.query_scalar, low=1e-6) ** -0.5)


def _latent(text: Fields) -> LatentAttention:
    return LatentAttention(
        text.integer("num_attention_heads"),
        query_rank=text.integer("q_lora_rank", 0, low=0),
        kv_rank=text.integer("kv_lora_rank"),
        nope_dim=text.integer("qk_nope_head_dim"),
        rope_dim=text.integer("qk_rope_head_dim"),
        value_dim=text.integer("v_head_dim"),
        interleaved=text.flag("rope_interleave", True),
        bias=text.flag("attention_bias", False),
    )


def _recurrent(text: Fields, hidden_size: int) -> Recurrent:
    if text.raw("linear_num_value_heads"):
        return Recurrent(
            "delta",
            text.integer("linear_conv_kernel_dim", 4),
            num_heads=text.integer("linear_num_value_heads"),
            num_key_heads=text.integer("linear_num_key_heads"),
            key_dim=text.integer("linear_key_head_dim"),
            value_dim=text.integer("linear_value_head_dim"),
        )
    if all(text.raw(name) is None for name in ("mamba_d_state", "state_size", "mamba_expand", "expand")):
        raise text.error("it has linear_attention or Mamba layers and no sizes for them")
    inner = text.integer("mamba_expand", text.integer("expand", 2)) * hidden_size
    inner = text.integer("mamba_d_ssm", inner)
    states = text.integer("mamba_d_state", text.integer("state_size", 16))
    kernel = text.integer("mamba_d_conv", text.integer("conv_kernel", 4))
    groups = text.integer("n_groups", text.integer("mamba_n_groups", 0, low=0), low=0)
    if groups:  # Mamba 2: B and C pass the convolution too
        heads = text.integer("mamba_n_heads", inner // text.integer("mamba_d_head", 64))
        heads = text.integer("num_heads", heads)
        return Recurrent("mamba2", kernel, inner, states, num_heads=heads, num_groups=groups)
    rank = text.raw("mamba_dt_rank") or text.raw("time_step_rank")
    rank = rank if isinstance(rank, int) else -(-hidden_size // 16)
    return Recurrent("mamba", kernel, inner, states, rank=rank)
