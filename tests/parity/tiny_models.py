"""Tiny random models of every architecture, made and saved by transformers: the oracle for logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_COMMON = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _llama(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{**_COMMON, **changes})


def _rope(kind: str, **values: Any) -> Any:
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **values}
    return _llama(rope_parameters=parameters)


def _mistral() -> Any:
    from transformers import MistralConfig

    return MistralConfig(**_COMMON, sliding_window=24, head_dim=32)


def _qwen2() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**_COMMON, tie_word_embeddings=True)


def _qwen2_windows() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**_COMMON, use_sliding_window=True, sliding_window=20, max_window_layers=1)


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_COMMON, head_dim=32)


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    changes = {"num_hidden_layers": 8, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 16}
    return Gemma3TextConfig(**{**_COMMON, **changes})


def _deepseek(version: str, **changes: Any) -> Any:
    """Dense MLPs in all layers: only the attention differs from Llama."""
    import transformers

    latent = {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 3,
    }
    config = getattr(transformers, f"Deepseek{version}Config")
    return config(**{**_COMMON, **latent, **changes})


_DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}


CONFIGS = {
    "llama": _llama,
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-linear": lambda: _rope("linear", factor=2.0),
    "llama-llama3": lambda: _rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "llama-yarn": lambda: _rope("yarn", factor=4.0, original_max_position_embeddings=64),
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen2-windows": _qwen2_windows,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "deepseek-v2": lambda: _deepseek("V2"),
    "deepseek-v2-yarn": lambda: _deepseek(
        "V2", q_lora_rank=24, rope_parameters=_DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
    ),
    "deepseek-v3": lambda: _deepseek("V3", q_lora_rank=24),
    "deepseek-v3-yarn": lambda: _deepseek("V3", q_lora_rank=24, rope_parameters=_DEEPSEEK_YARN, attention_bias=True),
    "deepseek-v3-halves": lambda: _deepseek("V3", rope_interleave=False),
}


def make(name: str, folder: Path) -> Any:
    """Save a random model called `name` into `folder`; returns it. Norms and biases are randomized as well."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(4.0)  # transformers starts so small that every logit would be alike
    model.save_pretrained(folder)
    return model
