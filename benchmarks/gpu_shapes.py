"""Shapes of published models as config.json files for made-up weights, and the floors of their steps.

Public numbers only: widths, layers, experts, how weights are stored. `write` makes a folder that tokenmill and vLLM
open with `load_format="dummy"` and without a tokenizer; `layers` makes a short model with layers of every kind. Floors:
the bytes that a decode step must read at 4.8 TB/s (weights once, of the experts only those hit by independent tokens,
KV or states of every sequence), the operations of a prompt at 790 TFLOP/s (float8: 1,580). Used by
gpu_architectures.py; the standard library alone, but for `floors`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

Config = dict[str, Any]

BYTES, FLOPS, FLOAT8_FLOPS = 4.8e12, 790e12, 1580e12  # an H200
_COMMON: Config = {"torch_dtype": "bfloat16", "hidden_act": "silu", "tie_word_embeddings": False, "use_cache": True}
_QWEN3_30B: Config = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "use_sliding_window": False,
    "sliding_window": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_GPT_OSS_20B: Config = _COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "sliding_window": 128,
    "initial_context_length": 4096,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "vocab_size": 201088,
    "eos_token_id": 200002,
    "pad_token_id": 199999,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
_DEEPSEEK_V2_LITE: Config = _COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "attention_bias": False,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "vocab_size": 102400,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}
_FALCON_H1_7B: Config = _COMMON | {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 44,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_d_ssm": 3072,
    "mamba_n_heads": 24,
    "mamba_d_head": 128,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_norm_before_gate": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "attention_bias": False,
    "mlp_bias": False,
    "projectors_bias": False,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000000000.0,
    "rope_scaling": None,
    # The constants that multiply projections are folded into the weights by both engines.
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "key_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "mlp_multipliers": [1.0, 1.0],
    "ssm_in_multiplier": 1.0,
    "ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 1.0],
    "ssm_out_multiplier": 1.0,
    "vocab_size": 130048,
    "bos_token_id": 1,
    "eos_token_id": 11,
}
_GRANITE_H_TINY: Config = _COMMON | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "hidden_size": 1536,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if number % 10 == 5 else "mamba" for number in range(40)],
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
    "position_embedding_type": "nope",
    "normalization_function": "rmsnorm",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
    "bos_token_id": 100257,
    "eos_token_id": 100257,
    "pad_token_id": 100256,
}


def _in_float8_blocks(config: Config) -> Config:
    """As published for this model: blocks of 128 x 128, inputs rounded in groups of 128."""
    routers = [f"model.layers.{number}.mlp.gate" for number in range(config["num_hidden_layers"])]
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return config | {"quantization_config": settings | {"modules_to_not_convert": ["lm_head", *routers]}}


SHAPES: dict[str, Config] = {
    "qwen3-30b-a3b": _QWEN3_30B,
    "qwen3-30b-a3b-fp8": _in_float8_blocks(_QWEN3_30B),
    "gpt-oss-20b": _GPT_OSS_20B,
    "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
    "falcon-h1-7b": _FALCON_H1_7B,
    "granite-4.0-h-tiny": _GRANITE_H_TINY,
    "qwen3-30b-a3b-rounded": _QWEN3_30B,
}
ROUNDED = {"qwen3-30b-a3b-rounded": "fp8"}  # while loading, from bf16: the option `quantization` of both engines
# Options of one engine for a shape. States are float32 in tokenmill; vLLM's default would be the type of the model.
# vLLM's first choice for experts of one scale would be compiled for minutes.
VLLM_OPTIONS: dict[str, Config] = {
    "qwen3-30b-a3b-rounded": {"quantization": "fp8", "moe_backend": "triton"},
    "falcon-h1-7b": {"mamba_ssm_cache_dtype": "float32"},
    "granite-4.0-h-tiny": {"mamba_ssm_cache_dtype": "float32"},
}
# Linears in float8 blocks by CUTLASS, which vLLM brings along: it prefers two others, which it would first compile for
# minutes. Its experts are Triton's by default, with tilings tuned for this shape.
VLLM_ENVIRONMENT = {"qwen3-30b-a3b-fp8": {"VLLM_USE_DEEP_GEMM": "0", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0"}}


def shortened(config: Config, layers: int) -> Config:
    """The same with so many layers, among them one of every kind that is listed."""
    kinds = config.get("layer_types")
    if not kinds:
        return config | {"num_hidden_layers": layers}
    distinct = list(dict.fromkeys(kinds))
    return config | {"num_hidden_layers": max(layers, len(distinct)), "layer_types": (distinct + kinds)[:layers]}


def write(name: str, folder: Path, layers: int = 0) -> Path:
    """A folder with the config.json of a shape; `layers` 0: all."""
    config = shortened(SHAPES[name], layers) if layers else SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def floors(name: str, context: int = 512) -> dict[str, float]:
    """Milliseconds by workload that no engine can be faster than; `context`: tokens in, 64 further ones on average."""
    from tokenmill.checkpoint import hf_config
    from tokenmill.checkpoint.matrices import edge_matrices, layer_matrices

    config = SHAPES[name]
    description = hf_config.describe(config, None)
    matrices = [each for layer in description.layers for each in layer_matrices(description.hidden_size, layer)]
    matrices += [each for each in edge_matrices(description) if each.part != "embedding" or description.tie_embeddings]
    method = ROUNDED.get(name) or config.get("quantization_config", {}).get("quant_method", "")
    layers = [layer.feed_forward for layer in description.layers if layer.feed_forward is not None]
    chosen = max((layer.experts_per_token for layer in layers), default=0)

    def step_ms(tokens: int) -> float:
        kept = sum(_kept_bytes(mixer, context + 64) for layer in description.layers for mixer in layer.mixers)
        weights = 0.0
        for each in matrices:
            hit = 1 - (1 - chosen / each.copies) ** tokens if each.part == "expert" else 1.0
            weights += each.parameters * hit * _weight_bytes(each.part, method)
        return (weights + tokens * kept) / BYTES * 1e3

    def prompt_ms(tokens: int) -> float:
        seconds = 0.0
        for each in matrices:
            if each.part in ("head", "embedding"):
                continue
            used = chosen / each.copies if each.part == "expert" else 1.0
            rate = FLOAT8_FLOPS if method == "fp8" and each.part != "router" else FLOPS
            seconds += 2 * each.parameters * used * tokens / rate
        pairs = sum(_pair_flops(mixer, tokens) for layer in description.layers for mixer in layer.mixers)
        return (seconds + pairs / FLOPS) * 1e3

    return {
        "single": step_ms(1),
        "decode64": step_ms(64),
        "decode256": step_ms(256),
        "prefill8x8192": 8 * prompt_ms(8192),
    }


def _weight_bytes(part: str, method: str) -> float:
    if method == "mxfp4":
        return 17 / 32 if part == "expert" else 2.0
    return 1.0 if method == "fp8" and part not in ("router", "head", "embedding") else 2.0


def _kept_bytes(mixer: Any, context: int) -> float:
    """What a step reads of one sequence (and writes of a state), 16-bit rows and 32-bit states."""
    if mixer.kind == "recurrent":
        return 2 * 4.0 * math.prod(mixer.state_shape)
    if mixer.kind == "latent":
        return 2.0 * mixer.head_dim * context
    seen = min(context, mixer.window or context)
    return 2.0 * mixer.num_kv_heads * (mixer.head_dim + mixer.value_dim) * seen


def _pair_flops(mixer: Any, tokens: int) -> float:
    """Of attention: each token with those it sees; of a scan: each number of the state, twice, for every token."""
    if mixer.kind == "recurrent":
        return 4.0 * math.prod(mixer.state_shape) * tokens
    width = mixer.nope_dim + mixer.rope_dim if mixer.kind == "latent" else mixer.head_dim
    window = 0 if mixer.kind == "latent" else mixer.window
    pairs = tokens * window if window else tokens * tokens / 2
    return 2.0 * mixer.num_heads * (width + mixer.value_dim) * pairs
