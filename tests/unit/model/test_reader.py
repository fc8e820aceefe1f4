"""A checkpoint that does not fit its architecture is refused with every offending tensor named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.tiny_models import make
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import CheckpointError
from tokenmill.model.loader import load_model


def _edit(folder: Path, remove: str = "", add: dict[str, torch.Tensor] | None = None) -> None:
    tensors = load_file(folder / "model.safetensors")
    if remove:
        del tensors[remove]
    save_file({**tensors, **(add or {})}, folder / "model.safetensors", metadata={"format": "pt"})


def _load(folder: Path) -> None:
    load_model(open_checkpoint(folder), torch.device("cpu"), 32, "ref")


def test_missing_leftover_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    make("llama", tmp_path)
    _load(tmp_path)
    strange = {"model.layers.1.mlp.gate_proj.extra": torch.zeros(2), "model.norm.weight": torch.zeros(3)}
    _edit(tmp_path, remove="model.layers.2.self_attn.k_proj.weight", add=strange)
    with pytest.raises(CheckpointError) as caught:
        _load(tmp_path)
    message = str(caught.value)
    assert "model.layers.2.self_attn.k_proj.weight" in message
    assert "model.layers.1.mlp.gate_proj.extra" in message
    assert "model.norm.weight is [3], expected [64]" in message
    assert "\n" not in message


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    make("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_type"] = "llama9"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="model type 'llama9' is not supported yet"):
        _load(tmp_path)
