"""A Hugging Face `config.json` (or the same fields from elsewhere) -> PlannedModel.

Reads sizes only, for more families than the engine runs: dense and grouped-query, latent attention (DeepSeek), experts,
sliding windows, Mamba and gated delta rule, vision towers. A field that is missing or absurd is an error that names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.errors import CheckpointError
from tokenmill.plan.question.planned_model import Attention, FeedForward, LayerKind, PlannedModel

# Families whose feed-forward has no gate (two matrices instead of three).
_UNGATED = {"opt", "bloom", "gpt2", "gpt_neox", "gptj", "falcon", "phi", "starcoder2", "mpt", "nemotron"}
_TIED = {"gemma", "gemma2", "gemma3", "gemma3_text", "bloom", "opt", "gpt2"}
# Where families spell a size in their own way.
_SPELLINGS = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head", "num_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "model_max_length"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "moe_topk"),
}


class _Sizes:
    """Reads positive integers under any of their spellings."""

    def __init__(self, config: Mapping[str, Any], label: str) -> None:
        self.config, self.label = config, label

    def get(self, name: str, default: int | None = None) -> int:
        for spelling in (name, *_SPELLINGS.get(name, ())):
            value = self.config.get(spelling)
            if value is not None:
                if isinstance(value, list):
                    value = max(value, default=0)
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
                    raise CheckpointError(f"{self.label}: {spelling} = {value!r} is not a size", "correct config.json")
                return int(value)
        if default is None:
            raise CheckpointError(f"{self.label} has no {name}", "give the model's own config.json")
        return default


def from_config(config: Mapping[str, Any], name: str = "") -> PlannedModel:
    text = {**config, **dict(config.get("text_config") or {})}
    label = name or str(config.get("_name_or_path") or "config.json")
    sizes = _Sizes(text, label)
    model_type = str(text.get("model_type", ""))
    hidden = sizes.get("hidden_size")
    num_layers = sizes.get("num_hidden_layers")
    kinds = [
        (_attention(sizes, model_type, kind, hidden), _feed_forward(sizes, model_type, layer))
        for layer, kind in enumerate(_layer_kinds(text, sizes, num_layers))
    ]
    layers = tuple(LayerKind(count, *kind) for kind, count in Counter(kinds).items())
    return PlannedModel(
        name=label,
        hidden_size=hidden,
        vocab_size=sizes.get("vocab_size"),
        context_length=sizes.get("max_position_embeddings", 4096),
        layers=layers,
        tie_embeddings=bool(text.get("tie_word_embeddings", model_type in _TIED)),
        vision_parameters=_vision_parameters(config),
        stored_format=stored_format(config),
    )


def from_description(description: ModelDescription) -> PlannedModel:
    """The engine's record of a model, as the planner sees it."""
    ffn = FeedForward(description.intermediate_size)
    attentions = [
        Attention(layer.kind, description.num_heads, layer.num_kv_heads, layer.head_dim, layer.window)
        for layer in description.kv_layers()
    ]
    return PlannedModel(
        name=description.name or description.architecture,
        hidden_size=description.hidden_size,
        vocab_size=description.vocab_size,
        context_length=description.context_length,
        layers=tuple(LayerKind(count, attention, ffn) for attention, count in Counter(attentions).items()),
        tie_embeddings=description.tie_embeddings,
    )


def _layer_kinds(text: Mapping[str, Any], sizes: _Sizes, num_layers: int) -> list[str]:
    """ "full" | "sliding" | "recurrent" for each layer."""
    names = {"sliding_attention": "sliding", "linear_attention": "recurrent", "mamba": "recurrent"}
    listed = text.get("layer_types") or text.get("layers_block_type")
    if listed:
        return [names.get(str(kind), "full") for kind in listed]
    if text.get("attn_layer_period"):  # Jamba
        period, offset = sizes.get("attn_layer_period"), sizes.get("attn_layer_offset", 0)
        return ["full" if layer % period == offset else "recurrent" for layer in range(num_layers)]
    if text.get("full_attention_interval"):  # Qwen3-Next
        period = sizes.get("full_attention_interval")
        return ["full" if (layer + 1) % period == 0 else "recurrent" for layer in range(num_layers)]
    if str(text.get("model_type", "")).startswith("mamba"):
        return ["recurrent"] * num_layers
    pattern = text.get("sliding_window_pattern")
    if pattern and text.get("sliding_window"):  # Gemma 3: every `pattern`-th layer is full
        return ["full" if (layer + 1) % int(pattern) == 0 else "sliding" for layer in range(num_layers)]
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        alternating = str(text.get("model_type")) in ("gemma2", "gpt_oss")
        return ["full" if alternating and layer % 2 else "sliding" for layer in range(num_layers)]
    return ["full"] * num_layers


def _attention(sizes: _Sizes, model_type: str, kind: str, hidden: int) -> Attention:
    text = sizes.config
    if kind == "recurrent":
        return _recurrent(sizes, hidden)
    heads = sizes.get("num_attention_heads")
    if text.get("kv_lora_rank"):
        return Attention(
            "latent",
            heads,
            query_rank=sizes.get("q_lora_rank", 0),
            kv_rank=sizes.get("kv_lora_rank"),
            rope_dim=sizes.get("qk_rope_head_dim"),
            nope_dim=sizes.get("qk_nope_head_dim"),
            value_dim=sizes.get("v_head_dim"),
        )
    head_dim = sizes.get("head_dim", hidden // heads)
    kv_heads = 1 if text.get("multi_query") else sizes.get("num_key_value_heads", heads)
    gate = bool(text.get("attn_output_gate", model_type.startswith(("qwen3_next", "qwen3_5"))))
    window = sizes.get("sliding_window", 0) if kind == "sliding" else 0
    return Attention(kind, heads, kv_heads, head_dim, window, output_gate=gate)


def _recurrent(sizes: _Sizes, hidden: int) -> Attention:
    text = sizes.config
    if text.get("linear_num_value_heads"):  # gated delta rule
        key_heads, value_heads = sizes.get("linear_num_key_heads"), sizes.get("linear_num_value_heads")
        key_dim, value_dim = sizes.get("linear_key_head_dim"), sizes.get("linear_value_head_dim")
        keys, values = key_heads * key_dim, value_heads * value_dim
        conv = (sizes.get("linear_conv_kernel_dim", 4) - 1) * (2 * keys + values)
        delta = ((hidden, 2 * keys + 2 * values), (hidden, 2 * value_heads), (values, hidden))
        state = value_heads * key_dim * value_dim
        return Attention("recurrent", state_values=state, conv_values=conv, projections=delta)
    inner = sizes.get("mamba_expand", sizes.get("expand", 2)) * hidden
    states = sizes.get("mamba_d_state", sizes.get("state_size", 16))
    kernel = sizes.get("mamba_d_conv", sizes.get("conv_kernel", 4))
    groups = sizes.get("n_groups", sizes.get("mamba_n_groups", 0))
    if groups:  # Mamba 2: B and C pass the convolution too
        heads = sizes.get("num_heads", inner // sizes.get("mamba_d_head", 64))
        second = ((hidden, 2 * inner + 2 * groups * states + heads), (inner, hidden))
        conv = (kernel - 1) * (inner + 2 * groups * states)
        return Attention("recurrent", state_values=inner * states, conv_values=conv, projections=second)
    rank = sizes.get("mamba_dt_rank", -(-hidden // 16))
    projections = ((hidden, 2 * inner), (inner, rank + 2 * states), (rank, inner), (inner, hidden))
    conv = (kernel - 1) * inner
    return Attention("recurrent", state_values=inner * states, conv_values=conv, projections=projections)


def _feed_forward(sizes: _Sizes, model_type: str, layer: int) -> FeedForward:
    text = sizes.config
    gated = model_type not in _UNGATED
    experts = sizes.get("num_experts", 0)
    if model_type.startswith("mamba"):
        return FeedForward(0)
    if not experts or not _has_experts(text, sizes, layer):
        default = 4 * sizes.get("hidden_size") if not gated else None
        return FeedForward(sizes.get("intermediate_size", default), gated)
    size = sizes.get("moe_intermediate_size", sizes.get("intermediate_size", 0))
    shared = sizes.get("shared_expert_intermediate_size", 0)
    if not shared and text.get("n_shared_experts"):
        shared = sizes.get("n_shared_experts") * size
    return FeedForward(0, gated, experts, sizes.get("num_experts_per_tok"), size, shared)


def _has_experts(text: Mapping[str, Any], sizes: _Sizes, layer: int) -> bool:
    if layer < sizes.get("first_k_dense_replace", 0):
        return False
    if text.get("expert_layer_period"):  # Jamba
        return layer % sizes.get("expert_layer_period") == sizes.get("expert_layer_offset", 0)
    step = max(1, sizes.get("decoder_sparse_step", 1))
    return (layer + 1) % step == 0 and layer not in (text.get("mlp_only_layers") or ())


def _vision_parameters(config: Mapping[str, Any]) -> int:
    """Parameters of the image tower: stated, or counted as a plain transformer from `vision_config`."""
    if config.get("vision_parameters"):
        return int(config["vision_parameters"])
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping) or not vision.get("hidden_size"):
        return 0
    width = int(vision["hidden_size"])
    inner = int(vision.get("intermediate_size") or 4 * width)
    depth = int(vision.get("num_hidden_layers") or vision.get("depth") or 24)
    return depth * (4 * width * width + 2 * width * inner)


def stored_format(config: Mapping[str, Any]) -> str:
    """The weight format that a checkpoint says it holds (names of hardware/weight_formats.py)."""
    quantization = config.get("quantization_config") or {}
    method = str(quantization.get("quant_method", ""))
    if method in ("gptq", "awq"):
        return f"int{quantization.get('bits', 4)}-g{quantization.get('group_size', 128)}"
    if method == "mxfp4":
        return "mxfp4"
    if method == "fp8":
        return "fp8-block" if quantization.get("weight_block_size") else "fp8"
    if method == "modelopt":
        algorithm = str(quantization.get("quant_algo", "")).lower()
        return "nvfp4" if "fp4" in algorithm else "fp8"
    if method in ("compressed-tensors", "compressed_tensors"):
        return _compressed_format(quantization)
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    return "fp32" if dtype == "float32" else "bf16"


def _compressed_format(quantization: Mapping[str, Any]) -> str:
    for group in dict(quantization.get("config_groups") or {}).values():
        weights = dict(group).get("weights") or {}
        bits, kind = int(weights.get("num_bits", 8)), str(weights.get("type", "int"))
        if kind == "float":
            return {4: "nvfp4", 8: "fp8"}.get(bits, "bf16")
        return f"int4-g{weights.get('group_size') or 128}" if bits == 4 else "int8"
    return "bf16"
