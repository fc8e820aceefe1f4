"""Configs of tiny models with recurrent layers, for tiny_models.py. Each takes the sizes that all tiny models share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Sizes = dict[str, Any]
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
_DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}

_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def _without_attention(sizes: Sizes) -> Sizes:
    names = ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "pad_token_id")
    # Mamba's own 0.1, times four, makes values so large that two orders of summation differ by 1e-4.
    return {**{name: sizes[name] for name in names}, "num_hidden_layers": 3, "initializer_range": 0.02}


def _mamba(sizes: Sizes, **changes: Any) -> Any:
    from transformers import MambaConfig

    return MambaConfig(**_without_attention(sizes), state_size=8, **changes)


def _falcon_mamba(sizes: Sizes) -> Any:
    from transformers import FalconMambaConfig

    return FalconMambaConfig(**_without_attention(sizes), state_size=8)


def _mamba2(sizes: Sizes, **changes: Any) -> Any:
    from transformers import Mamba2Config

    own = {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16}
    return Mamba2Config(**_without_attention(sizes), **{**own, **changes})


def _jamba(sizes: Sizes, num_experts: int = 1) -> Any:
    from transformers import JambaConfig

    own = {"attn_layer_period": 4, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8}
    return JambaConfig(**{**sizes, "num_hidden_layers": 4}, **own, num_experts=num_experts, num_experts_per_tok=2)


def _bamba(sizes: Sizes) -> Any:
    from transformers import BambaConfig

    return BambaConfig(**sizes, attn_layer_indices=[1], **_MAMBA2)


def _granite(sizes: Sizes, experts: int = 0, **changes: Any) -> Any:
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        **{**sizes, "num_hidden_layers": 4},
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        shared_intermediate_size=48,
        num_local_experts=experts,
        embedding_multiplier=12.0,
        logits_scaling=6.0,
        residual_multiplier=0.22,
        attention_multiplier=0.25,
        **_MAMBA2,
        **changes,
    )


def _falcon_h1(sizes: Sizes, **changes: Any) -> Any:
    from transformers import FalconH1Config

    own = {
        "head_dim": 16,
        "mamba_d_ssm": 96,
        "mamba_n_heads": 6,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "mamba_n_groups": 2,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.5,
        "mlp_multipliers": [1.3, 0.7],
        "key_multiplier": 0.6,
        "attention_in_multiplier": 1.4,
        "attention_out_multiplier": 0.9,
        "ssm_multipliers": [1.1, 0.8, 1.2, 0.9, 0.7],
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.85,
    }
    return FalconH1Config(**{**sizes, **_MAMBA2, **own, **changes})


def _qwen3_next(sizes: Sizes, dense: tuple[int, ...] = (0, 1, 2, 3)) -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(**{**sizes, **_DELTA, **_EXPERTS}, mlp_only_layers=list(dense))


def _qwen3_5_moe(sizes: Sizes) -> Any:
    from transformers import Qwen3_5MoeTextConfig

    return Qwen3_5MoeTextConfig(**{**sizes, **_DELTA, **_EXPERTS})


def _qwen3_5(sizes: Sizes) -> Any:
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(**{**sizes, **_DELTA})


RECURRENT: dict[str, Callable[[Sizes], Any]] = {
    "mamba": _mamba,
    "mamba-biases": lambda sizes: _mamba(sizes, use_bias=True, use_conv_bias=False, conv_kernel=3, time_step_rank=5),
    "falcon_mamba": _falcon_mamba,
    "mamba2": _mamba2,
    "mamba2-limits": lambda sizes: _mamba2(sizes, time_step_limit=[0.05, 1.0], use_bias=True, tie_word_embeddings=True),
    "jamba": _jamba,
    "jamba-experts": lambda sizes: _jamba(sizes, 4),
    "bamba": _bamba,
    "granitemoehybrid": _granite,
    "granitemoehybrid-rope": lambda sizes: _granite(sizes, position_embedding_type="rope"),
    "granitemoehybrid-experts": lambda sizes: _granite(sizes, 4),
    "falcon_h1": _falcon_h1,
    "falcon_h1-norms": lambda sizes: _falcon_h1(sizes, mamba_norm_before_gate=True),
    "falcon_h1-plain": lambda sizes: _falcon_h1(sizes, mamba_rms_norm=False),
    "qwen3_next": _qwen3_next,
    "qwen3_next-experts": lambda sizes: _qwen3_next(sizes, (1,)),
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
}
