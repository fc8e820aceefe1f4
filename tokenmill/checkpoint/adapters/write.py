"""Writes an adapter in PEFT's format, so that PEFT, vLLM and llama.cpp's converter read it as one of their own.

Ranks and alphas that differ between modules go into the patterns; the scale of each matrix is kept as alpha = scale *
rank. Names are those of the base's Hugging Face files. Called by extraction and training.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tokenmill.checkpoint.adapters.adapter import EMBEDDING, Adapter
from tokenmill.checkpoint.adapters.peft import BASE_HASH, CONFIG_FILE, PREFIX, WEIGHTS_FILE


def write_adapter(
    adapter: Adapter,
    directory: Path,
    rename: Callable[[str], str] = lambda name: name,
    dtype: torch.dtype = torch.float32,
) -> None:
    """`rename`: canonical module -> its name in the base's files."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for matrix in adapter.matrices.values():
        module = PREFIX + rename(matrix.name)
        if matrix.name == EMBEDDING:
            tensors[f"{module}.lora_embedding_A"] = matrix.b.T
            tensors[f"{module}.lora_embedding_B"] = matrix.a.T
        else:
            tensors[f"{module}.lora_A.weight"] = matrix.a
            tensors[f"{module}.lora_B.weight"] = matrix.b
        if matrix.magnitude is not None:
            tensors[f"{module}.lora_magnitude_vector"] = matrix.magnitude
    for name, tensor in adapter.saved.items():
        tensors[PREFIX + rename(name)] = tensor
    stored = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    metadata = {"format": "pt"} | ({BASE_HASH: adapter.base_hash} if adapter.base_hash else {})
    save_file(stored, directory / WEIGHTS_FILE, metadata)
    text = json.dumps(adapter_config(adapter, rename), indent=2, ensure_ascii=False)
    (directory / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def adapter_config(adapter: Adapter, rename: Callable[[str], str] = lambda name: name) -> dict[str, Any]:
    """adapter_config.json: the most common rank and alpha, and patterns for the modules that have others."""
    matrices = list(adapter.matrices.values())
    ranks = {rename(each.name): each.rank for each in matrices}
    alphas = {rename(each.name): _tidy(each.scale * each.rank) for each in matrices}
    rank = Counter(ranks.values()).most_common(1)[0][0] if ranks else 1
    alpha = Counter(alphas.values()).most_common(1)[0][0] if alphas else 1
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_name,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {re.escape(name): each for name, each in ranks.items() if each != rank},
        "alpha_pattern": {re.escape(name): each for name, each in alphas.items() if each != alpha},
        # Whole names: tails such as "q_proj" would also match layers that have no adapter.
        "target_modules": sorted(ranks),
        "modules_to_save": sorted({rename(name).rpartition(".")[0] for name in adapter.saved}) or None,
        "use_rslora": False,
        "use_dora": any(each.magnitude is not None for each in matrices),
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _tidy(alpha: float) -> float:
    """Without the dust of a product: 16 for 15.999999999999998."""
    return round(alpha) if abs(alpha - round(alpha)) < 1e-9 else alpha
