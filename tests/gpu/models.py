"""Models for GPU tests: a config.json whose weights are made up, and what counts as the same greedy choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenmill import LLM, SamplingParams

_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 32,
    "num_hidden_layers": 4,
    "sliding_window": 16,
    "query_pre_attn_scalar": 24,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
}
# LayerNorm, also of each head, parallel halves, half of each head rotated.
_STABLELM = {
    "architectures": ["StableLmForCausalLM"],
    "model_type": "stablelm",
    "partial_rotary_factor": 0.5,
    "use_parallel_residual": True,
    "qk_layernorm": True,
    "use_qkv_bias": True,
}
# Learned positions, no rotation, no gate.
_GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "tie_word_embeddings": True}
# Norms behind each half and over whole projections.
_OLMO2 = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
_DEEPSEEK3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 16,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "quantization_config": {"quant_method": "mxfp4"},
}
_QWEN3_FP8 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_key_value_heads": 4,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _TINY,
    "qwen3": _TINY | _QWEN3,
    "gemma3": _TINY | _GEMMA3,
    "deepseek3": _TINY | _DEEPSEEK3,
    "stablelm": _TINY | _STABLELM,
    "gpt2": _TINY | _GPT2,
    "olmo2": _TINY | _OLMO2,
    "gpt_oss": _TINY | _GPT_OSS,
    "qwen3_fp8": _TINY | _QWEN3_FP8,
}


def write_config(folder: Path, name: str = "llama", **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    return folder


def greedy(llm: LLM, prompts: list[list[int]], length: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def worst_choice(reference: LLM, prompt: list[int], chosen: list[int]) -> float:
    """By how much the reference's log-probability of a chosen token falls short of the best one, at worst."""
    return max(best - own for own, best in scores(reference, prompt, chosen))


def scores(reference: LLM, prompt: list[int], chosen: list[int]) -> list[tuple[float, float]]:
    """For each chosen token its log-probability by the reference, and that of the reference's best token there."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    scored = reference.generate([prompt + chosen], params)[0].prompt_logprobs
    assert scored is not None
    pairs = []
    for token, entries in zip(chosen, scored[len(prompt) :], strict=True):
        assert entries is not None
        pairs.append((entries[token].logprob, max(each.logprob for each in entries.values())))
    return pairs
