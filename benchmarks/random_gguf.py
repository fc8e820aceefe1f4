"""GGUF files with random weights: the layers of Qwen3-0.6B, 0.47 billion weights, and a vocabulary without a meaning.

Used by cpu_shapes.py. All types share their dimensions; the mixes are those of `quantize`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks.cpu_experts import attention_shapes, random_blocks, vocabulary
from tokenmill.checkpoint.gguf_writer import GGUFWriter, TensorSlot, Value, pack_value
from tokenmill.kernels.ggml_types import TYPES
from tokenmill.quantize.ggml.mixes import Shape, choose_types, find_mix

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCABULARY = 28, 1024, 16, 8, 128, 3072, 32768
POOL = 1 << 22  # random weights made per type; larger tensors repeat them


def shapes() -> dict[str, tuple[int, ...]]:
    """GGUF name -> shape, row-major, in the order of the file. The embedding is also the head."""
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        for name, shape in {
            **attention_shapes(HIDDEN, HEADS, KV_HEADS, HEAD_DIM),
            "ffn_gate": (MLP, HIDDEN),
            "ffn_up": (MLP, HIDDEN),
            "ffn_down": (HIDDEN, MLP),
        }.items():
            found[f"blk.{layer}.{name}.weight"] = shape
    return found | {"output_norm.weight": (HIDDEN,)}


def metadata(mix: str) -> dict[str, Value]:
    values: dict[str, Value] = {
        "general.architecture": "qwen3",
        "general.name": f"random {mix}",
        "general.file_type": find_mix(mix).file_type,
        "qwen3.block_count": LAYERS,
        "qwen3.context_length": 4096,
        "qwen3.embedding_length": HIDDEN,
        "qwen3.feed_forward_length": MLP,
        "qwen3.attention.head_count": HEADS,
        "qwen3.attention.head_count_kv": KV_HEADS,
        "qwen3.attention.key_length": HEAD_DIM,
        "qwen3.attention.value_length": HEAD_DIM,
        "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3.rope.freq_base": 1e6,
    }
    return values | vocabulary(VOCABULARY)


def make_file(path: Path, mix: str) -> None:
    model = Shape(LAYERS, HEADS, KV_HEADS, has_output=False, has_importance=False)
    types = choose_types(find_mix(mix), shapes(), model)
    generator = np.random.default_rng(0)
    pools: dict[str, torch.Tensor] = {}
    slots = [TensorSlot(name, shape, types[name]) for name, shape in shapes().items()]
    with GGUFWriter(path, {key: pack_value(value) for key, value in metadata(mix).items()}, slots) as writer:
        for slot in slots:
            if slot.name.endswith("_norm.weight"):
                writer.append(torch.ones(slot.shape).view(torch.uint8))
                continue
            if slot.type_name not in pools:
                pools[slot.type_name] = _random_bytes(slot.type_name, generator)
            pool = pools[slot.type_name]
            left = slot.nbytes
            while left:
                writer.append(pool[: min(left, len(pool))])
                left -= min(left, len(pool))


def _random_bytes(type_name: str, generator: np.random.Generator) -> torch.Tensor:
    if type_name in ("F32", "BF16"):
        numbers = torch.from_numpy(generator.standard_normal(POOL, dtype=np.float32) / 32)
        return numbers.to(torch.bfloat16 if type_name == "BF16" else torch.float32).view(torch.uint8)
    return torch.from_numpy(random_blocks(type_name, POOL // TYPES[type_name].block_size, generator)).flatten()
