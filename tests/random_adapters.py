"""Random PEFT adapters that change what a model says: for tests of serving many of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tokenmill.checkpoint.adapters.adapter import Adapter, AdapterMatrix
from tokenmill.checkpoint.adapters.fit import module_shapes
from tokenmill.checkpoint.adapters.write import write_adapter
from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.open import open_checkpoint

TARGETS = ("q_proj", "v_proj", "down_proj")


def describe(model: Path) -> ModelDescription:
    return open_checkpoint(model).description


def make_adapter(
    model: Path, folder: Path, seed: int, rank: int = 4, targets: Sequence[str] = TARGETS, strength: float = 1.0
) -> Path:
    """An adapter of `model` in `folder`; each seed says something else."""
    generator = torch.Generator().manual_seed(seed)
    matrices = {}
    for name, (outputs, inputs) in module_shapes(describe(model)).items():
        if name.rpartition(".")[2] in targets:
            a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            b = torch.randn(outputs, rank, generator=generator) * strength / rank**0.5
            matrices[name] = AdapterMatrix(name, a, b, 1.0)
    write_adapter(Adapter(folder.name, matrices, base_name=model.name), folder)
    return folder
