"""Configurations of tiny models that a GGUF file can hold and llama.cpp loads, where the parity tests have others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.parity import tiny_models
from tests.parity.tiny_models import CONFIGS


def _changed(name: str, **changes: Any) -> Callable[[], Any]:
    original = CONFIGS[name]

    def make_config() -> Any:
        config = original()
        for key, value in changes.items():
            setattr(config, key, value)
        return config

    return make_config


_YARN = tiny_models._DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
# Where a file cannot say what the tiny model of the parity tests has, or llama.cpp computes it otherwise: windows of
# StarCoder 2 and Mistral, score scales of Gemma, an epsilon of its own for the norms of time steps.
CHANGED: dict[str, Callable[[], Any]] = {
    "mistral": _changed("mistral", sliding_window=None),
    "starcoder2": _changed("starcoder2", sliding_window=None),
    "gemma2": _changed("gemma2", query_pre_attn_scalar=32),
    "gemma3": _changed("gemma3", query_pre_attn_scalar=32),
    "phi3": _changed("phi3", sliding_window=None),
    "qwen2_moe": lambda: tiny_models._experts("qwen2_moe", **tiny_models._QWEN2_MOE),
    "olmoe": _changed("olmoe", num_key_value_heads=4),
    "cohere": _changed("cohere", use_qk_norm=False),
    "falcon_mamba": _changed("falcon_mamba", layer_norm_epsilon=1e-6, mixer_rms_eps=1e-6),
    "qwen3_next": _changed("qwen3_next-experts", mlp_only_layers=[], linear_value_head_dim=16),
    "deepseek_v2-yarn": lambda: tiny_models._deepseek("V2", q_lora_rank=24, rope_parameters=_YARN),
}
