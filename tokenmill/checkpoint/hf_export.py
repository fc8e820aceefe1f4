"""A ModelDescription back to Hugging Face files: config.json, generation_config.json, and the order of weight rows.

The inverse of hf_config.py: reading an exported config gives the description again, except for what the target layout
fixes (`exported_description` says what) and for a missing begin or end id where the model type has a default one.
Writes no weights and no files itself. Called by `quantize` and `convert`; tokenizers are in tokenizer_export.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.description import ModelDescription, RopeScaling, differences
from tokenmill.checkpoint.gguf_families import FAMILIES, STORED_AS
from tokenmill.checkpoint.gguf_recurrent import has_offset, is_decays, is_log_decays
from tokenmill.checkpoint.hf_config import describe
from tokenmill.checkpoint.hf_export_recurrent import mamba_keys, stored_keys
from tokenmill.checkpoint.mixers import LatentAttention
from tokenmill.checkpoint.rope_divisors import fit_llama3
from tokenmill.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

ROPE_DIVISORS = "rope_freqs.weight"  # GGUF's precomputed llama3 factors: config.json says the same in four numbers


@dataclass(frozen=True, slots=True)
class _Export:
    """How files of one architecture are written. `keys`: what a config says beyond the common keys."""

    model_type: str
    class_name: str
    keys: Callable[[ModelDescription], dict[str, Any]]
    norm_offset: float = 0.0  # of norms in Hugging Face files
    interleaved: bool = False  # rotary pairs are (2i, 2i + 1) there too


_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
_DTYPES = ("bfloat16", "float16", "float32")
_ROTATED = (".self_attn.q_proj.", ".self_attn.k_proj.")


def exported_description(checkpoint: Checkpoint) -> ModelDescription:
    """The description of `checkpoint` once its weights lie as Hugging Face keeps them (see `to_hf_layout`).

    Rotary pairs are halves, norms are stored as the family does it (Gemma: minus one), there is no image tower, and
    GGUF's rotary divisors become llama3 scaling.
    """
    description = checkpoint.description
    export = _export_of(description)
    if ROPE_DIVISORS in checkpoint:
        table = description.rope_table("full")
        divisors = checkpoint.tensor(ROPE_DIVISORS).data.double().tolist()
        description = description.with_rope_scaling("full", fit_llama3(divisors, table.rotary_dim, table.theta))
    offset = export.norm_offset
    return replace(description, rope_interleaved=export.interleaved, norm_offset=offset, vision_parameters=0)


def to_hf_layout(name: str, weight: Tensor, description: ModelDescription) -> Tensor:
    """A tensor of a checkpoint described by `description`, as a Hugging Face file keeps it.

    `weight` is a float tensor, or for a q or k projection any per-row part of it (codes, scales): rows of each head go
    from pairs (2i, 2i + 1) to pairs (i, i + head_dim / 2). Norms lose what a GGUF has added to them (Gemma's one).
    """
    if is_decays(name):
        return (-weight.float()).log()
    export = _export_of(description)
    if description.rope_interleaved and not export.interleaved and any(part in name for part in _ROTATED):
        head = description.head_dim
        pairs = weight.reshape(weight.shape[0] // head, head // 2, 2, *weight.shape[1:])
        return pairs.transpose(1, 2).reshape(weight.shape)
    offset = description.norm_offset - export.norm_offset
    return weight.float() + offset if offset and has_offset(name) else weight


def hf_tensor_name(name: str) -> str:
    """The canonical name under which a Hugging Face file has this tensor: decays are stored as logarithms."""
    return f"{name}_log" if is_decays(name) else name


def to_gguf_layout(name: str, weight: Tensor, description: ModelDescription) -> Tensor:
    """The inverse of `to_hf_layout` for the GGUF of a model: `description` is that of the Hugging Face side."""
    if is_log_decays(name):
        return -weight.float().exp()
    family = FAMILIES[STORED_AS[description.architecture]]
    if family.interleaved and not description.rope_interleaved and any(part in name for part in _ROTATED):
        head = description.head_dim
        halves = weight.reshape(weight.shape[0] // head, 2, head // 2, *weight.shape[1:])
        return halves.transpose(1, 2).reshape(weight.shape)
    offset = description.norm_offset
    return weight.float() + offset if offset and has_offset(name) else weight


def export_config(description: ModelDescription, dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json for a model of this description, whose float weights are stored as `dtype`.

    Rotary settings are written in the spelling of transformers 5 and in the older one, so that both read them.
    """
    assert dtype in _DTYPES, dtype
    export = _export_of(description)
    config: dict[str, Any] = {
        "architectures": [export.class_name],
        "model_type": export.model_type,
        "hidden_size": description.hidden_size,
        "intermediate_size": description.intermediate_size,
        "num_hidden_layers": description.num_layers,
        "num_attention_heads": description.num_heads,
        "num_key_value_heads": description.num_kv_heads,
        "head_dim": description.head_dim,
        "vocab_size": description.vocab_size,
        "max_position_embeddings": description.context_length,
        "rms_norm_eps" if description.norm == "rms" else "layer_norm_eps": description.norm_eps,
        "tie_word_embeddings": description.tie_embeddings,
        **generation_config(description),
        **_rope(description),
        "dtype": dtype,
        "torch_dtype": dtype,
        # Whose spelling the keys above have. Without it transformers 5 takes the tokenizer for a broken old one.
        "transformers_version": "5.0.0",
    }
    if description.name:
        config["_name_or_path"] = description.name
    config |= export.keys(description)
    _check(config, description)
    return config


def generation_config(description: ModelDescription) -> dict[str, Any]:
    """The ids that begin and end a text: generation_config.json, and a part of config.json."""
    ids = description.eos_ids
    return {"bos_token_id": description.bos_id, "eos_token_id": ids[0] if len(ids) == 1 else list(ids) or None}


def export_tokenizer(checkpoint: Checkpoint, directory: Path) -> list[Path]:
    """Write the tokenizer files of `checkpoint` into `directory`; returns their paths."""
    from tokenmill.checkpoint.tokenizer_export import write_tokenizer

    return write_tokenizer(checkpoint, directory)


def _llama_keys(description: ModelDescription) -> dict[str, Any]:
    layer = description.layers[0]
    assert layer.feed_forward is not None
    biases = {"attention_bias": layer.attention.qkv_bias, "mlp_bias": layer.feed_forward.bias}
    return {"hidden_act": _ACTIVATIONS[description.activation], **biases}


def _mistral_keys(description: ModelDescription) -> dict[str, Any]:
    return {"hidden_act": _ACTIVATIONS[description.activation], "sliding_window": description.sliding_window or None}


def _qwen2_keys(description: ModelDescription) -> dict[str, Any]:
    window = description.sliding_window or None
    kinds = _layer_types(description)
    return {
        "hidden_act": _ACTIVATIONS[description.activation],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": kinds.index("sliding_attention") if window else description.num_layers,
        "layer_types": kinds,
    }


def _qwen3_keys(description: ModelDescription) -> dict[str, Any]:
    return {**_qwen2_keys(description), "attention_bias": description.layers[0].attention.qkv_bias}


def _gemma3_keys(description: ModelDescription) -> dict[str, Any]:
    attention, window = description.layers[0].attention, description.sliding_window
    assert attention.scale is not None
    scalar = attention.scale**-2
    rounded = round(scalar)
    return {
        "hidden_activation": _ACTIVATIONS[description.activation],
        "attention_bias": attention.qkv_bias,
        **({"sliding_window": window} if window else {}),
        "layer_types": _layer_types(description),
        # A float32 or double square root loses the last bits of a whole number: give it back.
        "query_pre_attn_scalar": rounded if rounded**-0.5 == attention.scale else scalar,
        "attn_logit_softcapping": description.attention_softcap or None,
        "final_logit_softcapping": description.logit_softcap or None,
    }


def _routing_keys(description: ModelDescription) -> dict[str, Any]:
    """How many experts there are, of what size, in which layers, and how they are chosen."""
    ffns = [layer.feed_forward for layer in description.layers if layer.feed_forward is not None]
    ffn = next(each for each in ffns if each.num_experts)
    routing = ffn.routing
    assert routing is not None
    dense = [number for number, each in enumerate(ffns) if not each.num_experts]
    leading = dense == list(range(len(dense)))
    shared = {"shared_expert_intermediate_size": ffn.shared_size} if ffn.shared_gate else {}
    if ffn.shared_size and not ffn.shared_gate:
        shared = {"n_shared_experts": ffn.shared_size // ffn.expert_size}
    return {
        "hidden_act": _ACTIVATIONS[ffn.activation],
        "intermediate_size": max((each.intermediate_size for each in ffns), default=0) or ffn.expert_size,
        "num_experts": ffn.num_experts,
        "num_local_experts": ffn.num_experts,
        "n_routed_experts": ffn.num_experts,
        "num_experts_per_tok": ffn.experts_per_token,
        "moe_intermediate_size": ffn.expert_size,
        **shared,
        "norm_topk_prob": routing.normalize,
        "routed_scaling_factor": routing.scale,
        "n_group": routing.num_groups,
        "topk_group": routing.top_groups,
        **({"first_k_dense_replace": len(dense)} if leading else {"mlp_only_layers": dense}),
    }


def _expert_keys(description: ModelDescription) -> dict[str, Any]:
    """Of all families with experts; each reads what it knows."""
    d, attention, window = description, description.layers[0].attention, description.sliding_window or None
    rotated = d.rope_table("full").rotary_dim / attention.head_dim
    return {
        **_routing_keys(d),
        "attention_bias": attention.qkv_bias,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": d.num_layers,
        "layer_types": _layer_types(d),
        "use_qk_norm": attention.head_norms != "",
        **({} if rotated == 1.0 else {"partial_rotary_factor": rotated}),
        "embedding_multiplier": d.embedding_scale,
        "residual_multiplier": d.residual_scale,
        "logits_scaling": 1.0 / d.logit_scale,
        **({} if attention.scale is None else {"attention_multiplier": attention.scale}),
    }


def _windows(description: ModelDescription) -> dict[str, Any]:
    window = description.sliding_window
    return {**({"sliding_window": window} if window else {}), "layer_types": _layer_types(description)}


def _olmo3_keys(description: ModelDescription) -> dict[str, Any]:
    return {**_llama_keys(description), **_windows(description)}


def _granite_keys(description: ModelDescription) -> dict[str, Any]:
    attention = description.layers[0].attention
    scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
    return {
        **_llama_keys(description),
        "embedding_multiplier": description.embedding_scale,
        "residual_multiplier": description.residual_scale,
        "attention_multiplier": scale,
        "logits_scaling": 1.0 / description.logit_scale,
    }


def _cohere_keys(description: ModelDescription) -> dict[str, Any]:
    attention = description.layers[0].attention
    return {
        "hidden_act": _ACTIVATIONS[description.activation],
        "attention_bias": attention.qkv_bias,
        "logit_scale": description.logit_scale,
        "use_qk_norm": bool(attention.head_norms),
    }


def _cohere2_keys(description: ModelDescription) -> dict[str, Any]:
    return {**_cohere_keys(description), **_windows(description)}


def _smollm3_keys(description: ModelDescription) -> dict[str, Any]:
    rotates = [int(bool(layer.attention.rope)) for layer in description.layers]
    windows = {**_windows(description), "use_sliding_window": bool(description.sliding_window)}
    return {**_llama_keys(description), **windows, "no_rope_layers": rotates}


def _deepseek_keys(description: ModelDescription) -> dict[str, Any]:
    (a,) = description.layers[0].mixers
    assert isinstance(a, LatentAttention)
    keys: dict[str, Any] = {"first_k_dense_replace": description.num_layers}
    if "experts" in description.features():
        keys = _routing_keys(description)
        if description.architecture == "deepseek_v2":
            keys["topk_method"] = "group_limited_greedy" if keys["n_group"] > 1 else "greedy"
    return {
        **keys,
        "hidden_act": _ACTIVATIONS[description.activation],
        "num_key_value_heads": a.num_heads,
        "head_dim": a.rope_dim,
        "q_lora_rank": a.query_rank or None,
        "kv_lora_rank": a.kv_rank,
        "qk_nope_head_dim": a.nope_dim,
        "qk_rope_head_dim": a.rope_dim,
        "v_head_dim": a.value_dim,
        "rope_interleave": a.interleaved,
        "attention_bias": a.bias,
    }


def _layer_types(description: ModelDescription) -> list[str]:
    return [f"{kind}_attention" for kind in description.layer_kinds]


_EXPORTS = {
    "llama": _Export("llama", "LlamaForCausalLM", _llama_keys),
    "qwen2": _Export("qwen2", "Qwen2ForCausalLM", _qwen2_keys),
    "qwen3": _Export("qwen3", "Qwen3ForCausalLM", _qwen3_keys),
    "gemma": _Export("gemma", "GemmaForCausalLM", _llama_keys, norm_offset=1.0),
    "gemma2": _Export("gemma2", "Gemma2ForCausalLM", _gemma3_keys, norm_offset=1.0),
    "gemma3": _Export("gemma3_text", "Gemma3ForCausalLM", _gemma3_keys, norm_offset=1.0),
    "olmo2": _Export("olmo2", "Olmo2ForCausalLM", _llama_keys),
    "olmo3": _Export("olmo3", "Olmo3ForCausalLM", _olmo3_keys),
    "granite": _Export("granite", "GraniteForCausalLM", _granite_keys),
    "cohere": _Export("cohere", "CohereForCausalLM", _cohere_keys, interleaved=True),
    "cohere2": _Export("cohere2", "Cohere2ForCausalLM", _cohere2_keys, interleaved=True),
    "smollm3": _Export("smollm3", "SmolLM3ForCausalLM", _smollm3_keys),
    "mixtral": _Export("mixtral", "MixtralForCausalLM", _expert_keys),
    "qwen2_moe": _Export("qwen2_moe", "Qwen2MoeForCausalLM", _expert_keys),
    "qwen3_moe": _Export("qwen3_moe", "Qwen3MoeForCausalLM", _expert_keys),
    "olmoe": _Export("olmoe", "OlmoeForCausalLM", _expert_keys),
    "granitemoe": _Export("granitemoe", "GraniteMoeForCausalLM", _expert_keys),
    "glm4_moe": _Export("glm4_moe", "Glm4MoeForCausalLM", _expert_keys),
    "gpt_oss": _Export("gpt_oss", "GptOssForCausalLM", _expert_keys),
    "deepseek_v2": _Export("deepseek_v2", "DeepseekV2ForCausalLM", _deepseek_keys),
    "deepseek_v3": _Export("deepseek_v3", "DeepseekV3ForCausalLM", _deepseek_keys),
    "mamba": _Export("mamba", "MambaForCausalLM", mamba_keys),
    "mamba2": _Export("mamba2", "Mamba2ForCausalLM", mamba_keys),
    "falcon_mamba": _Export("falcon_mamba", "FalconMambaForCausalLM", mamba_keys),
    **dict.fromkeys(("jamba", "bamba", "granitemoehybrid", "falcon_h1"), _Export("", "", stored_keys)),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), _Export("", "", stored_keys, norm_offset=1.0)),
}
# Llama with windows is stored under another model type.
_SLIDING_EXPORTS = {"llama": _Export("mistral", "MistralForCausalLM", _mistral_keys)}


def _export_of(description: ModelDescription) -> _Export:
    table = _SLIDING_EXPORTS if description.num_sliding_layers else {}
    export = table.get(description.architecture) or _EXPORTS.get(description.architecture)
    if export is None:
        raise CheckpointError(
            f"files of architecture '{description.architecture}' cannot be written", f"known: {', '.join(_EXPORTS)}"
        )
    if "norms of each head" in description.features():
        raise CheckpointError("norms of each head cannot be written", "choose a GGUF format")
    return export


def _rope(description: ModelDescription) -> dict[str, Any]:
    if not description.rope_tables:
        return {}
    full = description.rope_table("full")
    theta, scaling = full.theta, full.scaling
    settings = _rope_scaling(scaling)
    old: dict[str, Any] = {"rope_theta": theta, "rope_scaling": None if scaling.kind == "default" else settings}
    new = {"rope_theta": theta, **settings}
    if len(description.rope_tables) == 1:
        return {**old, "rope_parameters": new}
    sliding = description.rope_table("sliding")
    local = {"rope_theta": sliding.theta, **_rope_scaling(sliding.scaling)}
    return {
        **old,
        "rope_local_base_freq": sliding.theta,
        "rope_parameters": {"full_attention": new, "sliding_attention": local},
    }


def _rope_scaling(scaling: RopeScaling) -> dict[str, Any]:
    settings: dict[str, Any] = {"rope_type": scaling.kind}
    if scaling.kind == "default":
        return settings
    settings["factor"] = scaling.factor
    if scaling.kind in ("llama3", "yarn"):
        settings["original_max_position_embeddings"] = scaling.original_context
    if scaling.kind == "llama3":
        settings |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        settings |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        optional = {name: getattr(scaling, name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
        settings |= {name: value for name, value in optional.items() if value}
    return settings


def _check(config: dict[str, Any], description: ModelDescription) -> None:
    """Refuse a description that no model type can express: reading the config back must give it again."""
    reread = describe(config)
    same = {
        name: getattr(reread, name)
        for name in ("rope_interleaved", "norm_offset", *(("bos_id",) if description.bos_id is None else ()))
    }
    if not description.eos_ids:
        same["eos_ids"] = reread.eos_ids
    expected = replace(description, **same)
    if reread != expected:
        names = differences(reread, expected)
        raise CheckpointError(
            f"no Hugging Face model type can express this {description.architecture} model ({', '.join(names)})",
            "choose a GGUF format for it",
        )
