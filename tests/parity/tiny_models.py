"""Tiny random models of every architecture, made and saved by transformers: the oracle for logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.parity.tiny_recurrent import RECURRENT

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


def _experts(name: str, **changes: Any) -> Any:
    """A config of a model with experts, by its model type."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[name](**{**_COMMON, "num_hidden_layers": 4, **changes})


_FEW_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Wide enough for ranks to have whole vectors of it: what torch computes of the rest of a row differs in the last bit.
_SMALL_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_QWEN2_MOE = {**_SMALL_EXPERTS, "shared_expert_intermediate_size": 48}
_GLM4_MOE = {
    "head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LLAMA4 = {
    "head_dim": 16,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 16,
    "floor_scale": 8,
}


def _dense(class_name: str, **changes: Any) -> Callable[[], Any]:
    """A config of four layers, so that patterns of every fourth layer occur. A change to None leaves a key out."""
    values = {**_COMMON, "num_hidden_layers": 4, **changes}

    def make_config() -> Any:
        return getattr(import_module("transformers"), class_name)(**{k: v for k, v in values.items() if v is not _LEFT})

    return make_config


_LEFT = object()
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_FALCON = {"intermediate_size": _LEFT, "num_key_value_heads": _LEFT}
_GPT2 = {"num_key_value_heads": _LEFT, "intermediate_size": _LEFT}


def _deepseek(version: str, **changes: Any) -> Any:
    """Experts behind the first layer, one shared one; DeepSeek-V3 chooses among them by groups."""
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
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        **({"n_group": 4, "topk_group": 2} if version == "V3" else {}),
    }
    config = getattr(transformers, f"Deepseek{version}Config")
    return config(**{**_COMMON, **latent, **changes})


_ALL_DENSE = {"first_k_dense_replace": 3}
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
    "gemma": _dense("GemmaConfig", head_dim=32),
    "gemma2": _dense(
        "Gemma2Config",
        head_dim=32,
        query_pre_attn_scalar=24,
        sliding_window=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "phi3": _dense("Phi3Config", sliding_window=24),
    "phi3-longrope": _dense("Phi3Config", original_max_position_embeddings=32, rope_parameters=_LONGROPE),
    "phi3-longrope-short": _dense("Phi3Config", original_max_position_embeddings=256, rope_parameters=_LONGROPE),
    "olmo2": _dense("Olmo2Config"),
    "olmo3": _dense("Olmo3Config", sliding_window=16),
    "granite": _dense(
        "GraniteConfig",
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.25,
        logits_scaling=6.0,
        attention_bias=True,
    ),
    "cohere": _dense("CohereConfig", use_qk_norm=True, logit_scale=0.25),
    "cohere-plain": _dense("CohereConfig", attention_bias=True, num_key_value_heads=4),
    "cohere2": _dense("Cohere2Config", sliding_window=16, logit_scale=0.5),
    "smollm3": _dense("SmolLM3Config"),
    "glm": _dense("GlmConfig", head_dim=16),
    "glm4": _dense("Glm4Config", head_dim=16),
    "starcoder2": _dense("Starcoder2Config", sliding_window=16),
    "starcoder2-unbiased": _dense("Starcoder2Config", use_bias=False, hidden_act="gelu"),
    "stablelm": _dense("StableLmConfig", rope_parameters=_PARTIAL, use_qkv_bias=True),
    "stablelm-parallel": _dense(
        "StableLmConfig", rope_parameters=_PARTIAL, use_parallel_residual=True, qk_layernorm=True
    ),
    "gpt_neox": _dense("GPTNeoXConfig", num_key_value_heads=_LEFT, rope_parameters=_PARTIAL),
    "gpt_neox-sequential": _dense(
        "GPTNeoXConfig", num_key_value_heads=_LEFT, use_parallel_residual=False, attention_bias=False, hidden_act="relu"
    ),
    "gpt2": _dense("GPT2Config", **_GPT2),
    "gpt2-scaled": _dense("GPT2Config", **_GPT2, n_inner=80, scale_attn_by_inverse_layer_idx=True),
    "falcon": _dense("FalconConfig", **_FALCON),
    "falcon-40b": _dense("FalconConfig", **_FALCON, new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=96),
    "falcon-11b": _dense(
        "FalconConfig", **_FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    "falcon-sequential": _dense("FalconConfig", **_FALCON, parallel_attn=False, multi_query=False, bias=True),
    "phi": _dense("PhiConfig", qk_layernorm=True),
    "phi-plain": _dense("PhiConfig", num_key_value_heads=4),
    "mixtral": lambda: _experts("mixtral", **_FEW_EXPERTS, sliding_window=None),
    "qwen2_moe": lambda: _experts("qwen2_moe", **_QWEN2_MOE, mlp_only_layers=[1]),
    "qwen2_moe-windows": lambda: _experts(
        "qwen2_moe", **_QWEN2_MOE, use_sliding_window=True, sliding_window=20, max_window_layers=3, norm_topk_prob=True
    ),
    "qwen3_moe": lambda: _experts("qwen3_moe", **_SMALL_EXPERTS, head_dim=32, norm_topk_prob=True),
    "qwen3_moe-unnormalized": lambda: _experts(
        "qwen3_moe", **_SMALL_EXPERTS, head_dim=32, norm_topk_prob=False, decoder_sparse_step=2
    ),
    "olmoe": lambda: _experts("olmoe", num_experts=8, num_experts_per_tok=2, norm_topk_prob=False),
    "granitemoe": lambda: _experts(
        "granitemoe",
        **_FEW_EXPERTS,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.25,
        logits_scaling=6.0,
    ),
    "glm4_moe": lambda: _experts("glm4_moe", **_GLM4_MOE, use_qk_norm=True),
    "glm4_moe-groups": lambda: _experts(
        "glm4_moe",
        **{**_GLM4_MOE, "n_group": 4, "topk_group": 2},
        attention_bias=True,
        routed_scaling_factor=1.5,
        norm_topk_prob=False,
    ),
    "gpt_oss": lambda: _experts("gpt_oss", **_FEW_EXPERTS, head_dim=16, sliding_window=16),
    "llama4_text": lambda: _experts("llama4_text", **_LLAMA4),
    "llama4_text-plain": lambda: _experts(
        "llama4_text", **{**_LLAMA4, "interleave_moe_layer_step": 1}, use_qk_norm=False, attn_temperature_tuning=False
    ),
    **{name: partial(config, _COMMON) for name, config in RECURRENT.items()},
    "deepseek_v2": lambda: _deepseek("V2"),
    "deepseek_v2-groups": lambda: _deepseek(
        "V2", topk_method="group_limited_greedy", n_group=4, topk_group=2, n_shared_experts=2, routed_scaling_factor=2.0
    ),
    "deepseek_v2-yarn": lambda: _deepseek(
        "V2", **_ALL_DENSE, q_lora_rank=24, rope_parameters=_DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
    ),
    "deepseek_v3": lambda: _deepseek("V3", q_lora_rank=24),
    "deepseek_v3-yarn": lambda: _deepseek(
        "V3", **_ALL_DENSE, q_lora_rank=24, rope_parameters=_DEEPSEEK_YARN, attention_bias=True
    ),
    "deepseek_v3-halves": lambda: _deepseek("V3", rope_interleave=False),
}
# Decays of states and convolutions: larger ones would leave nothing of a state, or make everything alike.
_KEPT = ("A_log", "conv1d.weight")


# Those whose files are written in Hugging Face's layout: their tensors have the canonical names.
_WRITTEN = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "olmo2", "olmo3", "granite", "cohere")
_WRITTEN += ("cohere2", "smollm3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "glm4_moe", "gpt_oss")
_WRITTEN += ("deepseek_v2", "deepseek_v3", "mamba", "mamba2", "falcon_mamba")
WRITTEN = [name for name in CONFIGS if name.partition("-")[0] in _WRITTEN and name != "cohere"]


def make(name: str, folder: Path) -> Any:
    """Save a random model called `name` into `folder`; returns it. Norms and biases are randomized as well."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if label.endswith(_KEPT):
                continue
            if parameter.dim() == 1 or label.endswith("_bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(4.0)  # transformers starts so small that every logit would be alike
        for label, buffer in model.named_buffers():
            if label.endswith("e_score_correction_bias"):  # decides who is chosen, and is no parameter
                buffer.add_(torch.randn_like(buffer) * 0.2)
    model.save_pretrained(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of as many words as the models have ids, so that the engine can run them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {f"w{number}": number for number in range(_COMMON["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
