"""Adapters made by PEFT for tiny models: of different kinds, ranks and targets, each merged by PEFT as its oracle."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
# Ranks below, at and above a block of 16; one or several matrices of a product; every way to scale.
KINDS: list[dict[str, Any]] = [
    {"r": 4, "lora_alpha": 8, "target_modules": [*ATTENTION, *MLP]},
    {"r": 16, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    {"r": 8, "lora_alpha": 32, "target_modules": MLP, "use_rslora": True},
    {"r": 5, "lora_alpha": 5, "target_modules": ["k_proj", "up_proj", "lm_head"]},
    {
        "r": 24,
        "lora_alpha": 12,
        "target_modules": [*ATTENTION, "down_proj"],
        "rank_pattern": {"q_proj": 3},
        "alpha_pattern": {"layers.1.self_attn.o_proj": 40},
    },
    {"r": 8, "lora_alpha": 16, "target_modules": [*ATTENTION, *MLP], "use_dora": True},
    {"r": 2, "lora_alpha": 4, "target_modules": ["o_proj", "embed_tokens"]},
    {"r": 4, "lora_alpha": 4, "target_modules": ["gate_proj"], "modules_to_save": ["lm_head"]},
]


def make_adapter(base: Any, kind: dict[str, Any], folder: Path, seed: int = 0) -> Any:
    """Save a random adapter of `base` into `folder`; returns the merged model, or the unmerged one where merging would
    change both ends of a tied model."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    model = get_peft_model(copy.deepcopy(base), LoraConfig(task_type="CAUSAL_LM", **kind))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
            elif "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
            elif "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    edges = {"lm_head", "embed_tokens"} & {*kind["target_modules"], *kind.get("modules_to_save", ())}
    if edges and base.config.tie_word_embeddings:
        return model.eval()
    return model.merge_and_unload().float().eval()
