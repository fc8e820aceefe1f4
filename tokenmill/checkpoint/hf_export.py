"""A ModelDescription back to Hugging Face files: config.json, generation_config.json, and the order of weight rows.

The inverse of hf_config.py: reading an exported config gives the description again, except for what the target layout
fixes (`exported_description` says what) and for a missing begin or end id where the model type has a default one.
Writes no weights and no files itself. Called by `quantize` and `convert`; tokenizers are in tokenizer_export.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.description import ModelDescription, RopeScaling
from tokenmill.checkpoint.hf_config import describe
from tokenmill.checkpoint.rope_divisors import fit_llama3
from tokenmill.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

ROPE_DIVISORS = "rope_freqs.weight"  # GGUF's precomputed llama3 factors: config.json says the same in four numbers
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
_DTYPES = ("bfloat16", "float16", "float32")
_ROTATED = (".self_attn.q_proj.", ".self_attn.k_proj.")
_NORM_ENDING = "norm.weight"


def exported_description(checkpoint: Checkpoint) -> ModelDescription:
    """The description of `checkpoint` once its weights lie as Hugging Face keeps them (see `to_hf_layout`).

    Rotary pairs are halves, Gemma's norms are stored minus one, and GGUF's rotary divisors become llama3 scaling.
    """
    description = checkpoint.description
    scaling = description.rope_scaling
    if ROPE_DIVISORS in checkpoint:
        divisors = checkpoint.tensor(ROPE_DIVISORS).data.double().tolist()
        scaling = fit_llama3(divisors, description.head_dim, description.rope_theta)
    offset = 1.0 if description.architecture == "gemma3" else description.norm_offset
    return replace(description, rope_interleaved=False, norm_offset=offset, rope_scaling=scaling)


def to_hf_layout(name: str, weight: Tensor, description: ModelDescription) -> Tensor:
    """A tensor of a checkpoint described by `description`, as a Hugging Face file keeps it.

    `weight` is a float tensor, or for a q or k projection any per-row part of it (codes, scales): rows of each head go
    from pairs (2i, 2i + 1) to pairs (i, i + head_dim / 2). Gemma's norms lose the one that GGUF has added.
    """
    if description.rope_interleaved and any(part in name for part in _ROTATED):
        head = description.head_dim
        pairs = weight.reshape(weight.shape[0] // head, head // 2, 2, *weight.shape[1:])
        return pairs.transpose(1, 2).reshape(weight.shape)
    if description.architecture == "gemma3" and name.endswith(_NORM_ENDING):
        return weight.float() + (description.norm_offset - 1.0)
    return weight


def to_gguf_layout(name: str, weight: Tensor, description: ModelDescription) -> Tensor:
    """The inverse of `to_hf_layout` for the GGUF of a model: `description` is that of the Hugging Face side."""
    if description.architecture == "llama" and not description.rope_interleaved and any(p in name for p in _ROTATED):
        head = description.head_dim
        halves = weight.reshape(weight.shape[0] // head, 2, head // 2, *weight.shape[1:])
        return halves.transpose(1, 2).reshape(weight.shape)
    if description.architecture == "gemma3" and name.endswith(_NORM_ENDING):
        return weight.float() + description.norm_offset
    return weight


def export_config(description: ModelDescription, dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json for a model of this description, whose float weights are stored as `dtype`.

    Rotary settings are written in the spelling of transformers 5 and in the older one, so that both read them.
    """
    assert dtype in _DTYPES, dtype
    model_type = _model_type(description)
    config: dict[str, Any] = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "hidden_size": description.hidden_size,
        "intermediate_size": description.intermediate_size,
        "num_hidden_layers": description.num_layers,
        "num_attention_heads": description.num_heads,
        "num_key_value_heads": description.num_kv_heads,
        "head_dim": description.head_dim,
        "vocab_size": description.vocab_size,
        "max_position_embeddings": description.context_length,
        "rms_norm_eps": description.norm_eps,
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
    config |= _of_family(model_type, description)
    _check(config, description)
    return config


def generation_config(description: ModelDescription) -> dict[str, Any]:
    """The ids that begin and end a text: generation_config.json, and a part of config.json."""
    ids = description.eos_ids
    return {"bos_token_id": description.bos_id, "eos_token_id": ids[0] if len(ids) == 1 else list(ids) or None}


def export_tokenizer(checkpoint: Checkpoint, directory: Path) -> list[Path]:
    """Write the tokenizer files of `checkpoint` into `directory`; gives their paths."""
    from tokenmill.checkpoint.tokenizer_export import write_tokenizer

    return write_tokenizer(checkpoint, directory)


def _model_type(description: ModelDescription) -> str:
    if description.architecture == "gemma3":
        return "gemma3_text"
    if description.architecture == "llama" and description.num_sliding_layers:
        return "mistral"
    return description.architecture


def _of_family(model_type: str, description: ModelDescription) -> dict[str, Any]:
    """The keys that only this model type has."""
    activation = _ACTIVATIONS[description.activation]
    window = description.sliding_window or None
    kinds = [f"{kind}_attention" for kind in description.layer_kinds]
    if model_type == "llama":
        return {"hidden_act": activation, "attention_bias": description.qkv_bias, "mlp_bias": description.mlp_bias}
    if model_type == "mistral":
        return {"hidden_act": activation, "sliding_window": window}
    if model_type in ("qwen2", "qwen3"):
        first = kinds.index("sliding_attention") if window else description.num_layers
        return {
            "hidden_act": activation,
            **({"attention_bias": description.qkv_bias} if model_type == "qwen3" else {}),  # qwen2 always has it
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": first,
            "layer_types": kinds,
        }
    assert description.query_scale is not None
    scalar = description.query_scale**-2
    whole = round(scalar)
    return {
        "hidden_activation": activation,
        "attention_bias": description.qkv_bias,
        **({"sliding_window": window} if window else {}),
        "layer_types": kinds,
        # A float32 or double square root loses the last bits of a whole number: give it back.
        "query_pre_attn_scalar": whole if whole**-0.5 == description.query_scale else scalar,
        "attn_logit_softcapping": description.attention_softcap or None,
        "final_logit_softcapping": description.logit_softcap or None,
    }


def _rope(description: ModelDescription) -> dict[str, Any]:
    theta, scaling = description.rope_theta, description.rope_scaling
    settings = _rope_scaling(scaling)
    old: dict[str, Any] = {"rope_theta": theta, "rope_scaling": None if scaling.kind == "default" else settings}
    new = {"rope_theta": theta, **settings}
    if description.local_rope_theta is None:
        return {**old, "rope_parameters": new}
    local = {"rope_type": "default", "rope_theta": description.local_rope_theta}
    return {
        **old,
        "rope_local_base_freq": description.local_rope_theta,
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
    """Refuse a description that no model type of ours can say: reading the config back must give it again."""
    again = describe(config)
    same = {
        name: getattr(again, name)
        for name in ("rope_interleaved", "norm_offset", *(("bos_id",) if description.bos_id is None else ()))
    }
    if not description.eos_ids:
        same["eos_ids"] = again.eos_ids
    expected = replace(description, **same)
    if again != expected:
        names = [name for name in expected.__slots__ if getattr(again, name) != getattr(expected, name)]
        raise CheckpointError(
            f"no Hugging Face model type says what this {description.architecture} model does ({', '.join(names)})",
            "choose a GGUF format for it",
        )
