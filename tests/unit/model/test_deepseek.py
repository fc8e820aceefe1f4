"""What published DeepSeek files hold beyond the model that transformers saves."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.parity.tiny_models import make
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.model.loader import load_model


def test_layers_that_predict_further_tokens_are_left_aside(tmp_path: Path) -> None:
    make("deepseek_v3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    extra = {"model.layers.3.eh_proj.weight": torch.ones(4, 8), "model.layers.3.enorm.weight": torch.ones(4)}
    save_file(tensors | extra, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    assert load_model(open_checkpoint(tmp_path), torch.device("cpu"), 8, "ref").decoder.description.num_layers == 3
