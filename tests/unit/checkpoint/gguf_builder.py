"""Writes small, complete GGUF models with the gguf package, for the reader's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, LAYERS = 64, 4, 2, 96, 40, 3
CONTROL = {1: "<bos>", 2: "<|im_end|>", 3: "<|endoftext|>", 4: "<tool>"}


def tokens() -> list[str]:
    return [CONTROL.get(index, f"token{index}é") for index in range(VOCAB)]


def layer_shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    head = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (KV_HEADS * head, HIDDEN),
        "attn_v": (KV_HEADS * head, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }
    if architecture in ("qwen3", "gemma3"):
        shapes |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
    if architecture == "gemma3":
        shapes |= {"post_attention_norm": (HIDDEN,), "post_ffw_norm": (HIDDEN,)}
    return shapes


def write_model(
    path: Path,
    architecture: str = "llama",
    settings: Callable[[gguf.GGUFWriter], object] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
) -> dict[str, np.ndarray]:
    """Write the file; gives back the float values of each tensor, by GGUF name. Matrices are Q8_0. `without`: parts of
    the names of tensors that are left out."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny {architecture}")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens())
    writer.add_token_types([3 if index in CONTROL else 1 for index in range(VOCAB)])
    writer.add_token_scores([-float(index) for index in range(VOCAB)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if settings:
        settings(writer)
    values = model_values(architecture) | (extra_tensors or {})
    values = {name: value for name, value in values.items() if not any(part in name for part in without)}
    for name, value in values.items():
        if value.ndim == 2:
            writer.add_tensor(
                name, quantize(value, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0
            )
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def model_values(architecture: str) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        for name, shape in layer_shapes(architecture).items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
        if architecture == "qwen2":
            for name in ("attn_q", "attn_k", "attn_v"):
                shapes[f"blk.{layer}.{name}.bias"] = layer_shapes(architecture)[name][:1]
    return {name: generator.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}
