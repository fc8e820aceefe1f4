"""The mixer records of a config.json: heads and their sizes, latent ranks, sizes of recurrent states."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.checkpoint.configs.families import Family
from tokenmill.checkpoint.description import RopeTable
from tokenmill.checkpoint.fields import Fields
from tokenmill.checkpoint.mixers import Attention, LatentAttention, Mixer, Recurrent


def head_sizes(text: Fields, family: Family, hidden_size: int, num_heads: int) -> tuple[int, int]:
    """(KV heads, head size)."""
    num_kv_heads = _num_kv_heads(text, family, num_heads)
    if num_heads % num_kv_heads:
        raise text.error(f"'num_attention_heads' is {num_heads}, no multiple of {num_kv_heads} ('num_key_value_heads')")
    if family.head_dim is None and text.raw("head_dim") is None and hidden_size % num_heads:
        raise text.error(f"'hidden_size' is {hidden_size}, no multiple of {num_heads} ('num_attention_heads')")
    head_dim = text.integer("head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise text.error(f"'head_dim' is {head_dim}, which is odd")
    return num_kv_heads, head_dim


def _num_kv_heads(text: Fields, family: Family, num_heads: int) -> int:
    if not text.flag("new_decoder_architecture", False):
        if text.flag("multi_query", family.multi_query):
            return 1
        if family.multi_query:  # it counts KV heads in the new architecture only
            return num_heads
    return text.integer("num_key_value_heads", family.num_kv_heads or num_heads)


def mixers_by_kind(
    text: Fields, family: Family, hidden_size: int, kinds: set[str], window: int, tables: tuple[RopeTable, ...]
) -> dict[str, tuple[Mixer, ...]]:
    """For each kind of layer that occurs, its mixers."""
    result: dict[str, tuple[Mixer, ...]] = {}
    recurrent = (_recurrent(text, family, hidden_size),) if kinds & {"recurrent", "both"} else ()
    for kind in sorted(kinds):
        if kind == "recurrent":
            result[kind] = recurrent
            continue
        if is_latent(text, family):
            result[kind] = (_latent(text),)
            continue
        attention = _attention(text, family, hidden_size)
        if kind == "sliding":
            own_table = any(table.name == "sliding" for table in tables)
            attention = replace(attention, window=window, rope="sliding" if own_table else attention.rope)
        elif kind == "chunked":
            attention = replace(attention, chunk=text.integer("attention_chunk_size", 8192))
        if family.rope_layers == "sliding" and kind != "sliding":
            attention = replace(attention, rope="")
        result[kind] = (attention, *recurrent) if kind == "both" else (attention,)
    return result


def in_layer(mixer: Mixer, text: Fields, family: Family, layer: int) -> Mixer:
    """The mixer with what depends on the number of its layer."""
    if not isinstance(mixer, Attention):
        return mixer
    if not rotates(text, family, layer):
        mixer = _without_rotation(mixer, text, family)
    if text.flag("scale_attn_by_inverse_layer_idx", False):
        scale = mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale
        mixer = replace(mixer, scale=scale / (layer + 1))
    return mixer


def rotates(text: Fields, family: Family, layer: int) -> bool:
    """Whether a layer rotates its queries and keys. In `no_rope_layers` a 1 means that it does."""
    if family.rope_layers != "listed":
        return True
    listed = text.integers("no_rope_layers")
    if layer < len(listed):
        return bool(listed[layer])
    return (layer + 1) % text.integer("no_rope_layer_interval", 4) != 0


def _without_rotation(mixer: Attention, text: Fields, family: Family) -> Attention:
    """In a layer that does not rotate Llama 4 does not norm heads either, and scales queries by position."""
    scaled = family.temperature and text.flag("attn_temperature_tuning", True)
    return replace(
        mixer,
        rope="",
        head_norms="" if mixer.head_norms == "unit" else mixer.head_norms,
        temperature=(text.number("attn_scale", 0.1), text.number("floor_scale", 8192.0, low=1.0)) if scaled else None,
    )


def _attention(text: Fields, family: Family, hidden_size: int) -> Attention:
    num_heads = text.integer("num_attention_heads", dict(family.sizes).get("num_attention_heads"))
    num_kv_heads, head_dim = head_sizes(text, family, hidden_size, num_heads)
    bias = text.flag(family.bias_key, family.bias)
    # Falcon-H1 multiplies the input, the keys and the output: the scores by a constant, and the output by another.
    input_scale, key_scale = text.number("attention_in_multiplier", 1.0), text.number("key_multiplier", 1.0)
    if input_scale != 1.0 and bias:
        raise text.error("'attention_in_multiplier' together with 'attention_bias' is not supported")
    scale = _scale(text, family)
    if (input_scale, key_scale) != (1.0, 1.0):
        scale = (scale or head_dim**-0.5) * input_scale**2 * key_scale
    return Attention(
        num_heads,
        num_kv_heads,
        head_dim,
        head_dim,
        rope="full" if positions(text, family) == "rope" else "",
        scale=scale,
        softcap=softcap(text, "attn_logit_softcapping", family.attention_softcap),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        head_norms=family.head_norms or _optional_norms(text, family),
        sinks=family.sinks,
        output_gate=text.flag("attn_output_gate", family.output_gate),
        output_scale=input_scale * text.number("attention_out_multiplier", 1.0),
        causal=not text.flag("use_bidirectional_attention", False),
    )


def _optional_norms(text: Fields, family: Family) -> str:
    return family.optional_head_norms if text.flag(family.head_norms_key, family.uses_head_norms) else ""


def positions(text: Fields, family: Family) -> str:
    return "alibi" if text.flag("alibi", False) else family.positions


def softcap(text: Fields, name: str, default: float) -> float:
    """Null switches it off, absence does not."""
    return text.number(name, 0.0 if name in text.values else default)


def _scale(text: Fields, family: Family) -> float | None:
    if not text.flag("scale_attn_weights", True):  # GPT-2
        return 1.0
    if text.raw("attention_multiplier") is not None:  # Granite
        return text.number("attention_multiplier", low=1e-9)
    if family.query_scalar is None and text.raw("query_pre_attn_scalar") is None:
        return None
    return float(text.number("query_pre_attn_scalar", family.query_scalar, low=1e-6) ** -0.5)


def is_latent(text: Fields, family: Family) -> bool:
    """Whether attention keeps latents: in families that always do, or by the rank."""
    return family.latent or bool(text.raw("kv_lora_rank"))


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


def _recurrent(text: Fields, family: Family, hidden_size: int) -> Recurrent:
    if family.recurrence == "delta" or text.raw("linear_num_value_heads"):
        return _delta(text, family)
    if all(text.raw(name) is None for name in ("mamba_d_state", "state_size", "mamba_expand", "expand")):
        raise text.error("it has linear_attention or Mamba layers and no sizes for them")
    inner = text.integer("mamba_expand", text.integer("expand", 2)) * hidden_size
    inner = text.integer("mamba_d_ssm", inner)
    groups = text.integer("n_groups", text.integer("mamba_n_groups", 0, low=0), low=0)
    plain = Recurrent(
        family.recurrence or ("mamba2" if groups else "mamba"),
        text.integer("mamba_d_conv", text.integer("conv_kernel", 4)),
        inner,
        text.integer("mamba_d_state", text.integer("state_size", 16)),
        convolution_bias=text.flag("mamba_conv_bias", text.flag("use_conv_bias", True)),
        input_bias=text.flag("mamba_proj_bias", text.flag("use_bias", False)),
        output_bias=text.flag("projectors_bias", text.flag("mamba_proj_bias", text.flag("use_bias", False))),
    )
    return _mamba2(text, plain, groups) if plain.style == "mamba2" else _mamba(text, family, plain, hidden_size)


def _mamba(text: Fields, family: Family, plain: Recurrent, hidden_size: int) -> Recurrent:
    rank = text.raw("mamba_dt_rank") or text.raw("time_step_rank")
    rank = rank if isinstance(rank, int) else -(-hidden_size // 16)  # "auto"
    eps = text.number("mixer_rms_eps", text.number("rms_norm_eps", 1e-6))
    return replace(plain, rank=rank, step_norms=family.step_norms, step_norm_eps=eps)


def _mamba2(text: Fields, plain: Recurrent, groups: int) -> Recurrent:
    groups = groups or 1
    key = "num_heads" if text.raw("num_heads") else "mamba_n_heads"
    size = text.raw("mamba_d_head")
    heads = text.integer(key, plain.inner // (size if isinstance(size, int) and size > 0 else 64))
    if not heads or plain.inner % heads:
        raise text.error(f"'{key}' is {heads}, which does not divide the {plain.inner} channels of a Mamba layer")
    if heads % groups:
        group_key = "n_groups" if text.raw("n_groups") else "mamba_n_groups"
        raise text.error(f"'{key}' is {heads}, no multiple of {groups} ('{group_key}')")
    low, high = text.numbers("time_step_limit", (0.0, float("inf")))
    input_scale = text.number("ssm_in_multiplier", 1.0)
    multipliers = tuple(input_scale * each for each in text.numbers("ssm_multipliers", (1.0,) * 5))
    if input_scale != 1.0 and plain.input_bias:
        raise text.error("'ssm_in_multiplier' together with 'mamba_proj_bias' is not supported")
    normed = text.flag("mamba_rms_norm", True)
    first = text.flag("mamba_norm_before_gate", False)
    return replace(
        plain,
        num_heads=heads,
        num_groups=groups,
        time_step_limits=(low, high),
        norm=("ungated" if first else "gated") if normed else "",
        multipliers=multipliers,
        output_scale=text.number("ssm_out_multiplier", 1.0),
    )


def _delta(text: Fields, family: Family) -> Recurrent:
    mixer = Recurrent(
        "delta",
        text.integer("linear_conv_kernel_dim", 4),
        num_heads=text.integer("linear_num_value_heads"),
        num_key_heads=text.integer("linear_num_key_heads"),
        key_dim=text.integer("linear_key_head_dim"),
        value_dim=text.integer("linear_value_head_dim"),
        joined_inputs=family.joined_inputs,
    )
    if mixer.num_heads % mixer.num_key_heads:
        raise text.error(
            f"'linear_num_value_heads' is {mixer.num_heads}, no multiple of {mixer.num_key_heads} key heads"
        )
    return mixer
