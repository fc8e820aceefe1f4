"""Adapters made by the PEFT library on tiny models, and what PEFT makes of base and adapter: the oracle for ours."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch


def make_adapter(base: Path, folder: Path, seed: int = 0, size: float = 0.05, **changes: Any) -> Any:
    """Save a random adapter of `base` in `folder`; returns PEFT's model, unmerged. `changes`: of LoraConfig."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings: dict[str, Any] = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of embeddings that are stored, and of tied weights
        peft = get_peft_model(model, LoraConfig(**{**settings, "init_lora_weights": False, **changes})).eval()
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.data += size * torch.randn_like(parameter)
        peft.save_pretrained(folder)
    return peft


def save_merged(peft: Any, folder: Path) -> Path:
    """PEFT's own merge, as a checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.merge_and_unload().save_pretrained(folder)
    return folder
