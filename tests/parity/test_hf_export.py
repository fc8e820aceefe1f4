"""A GGUF model exported to Hugging Face layout computes the same in transformers as it does here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.parity.test_transformers import _logits, _tables
from tests.unit.checkpoint.gguf_builder import VOCAB, write_model
from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.hf_export import ROPE_DIVISORS, export_config, exported_description, to_hf_layout
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config import EngineConfig
from tokenmill.hardware.kv_layout import build_layout
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.loader import load_model
from tokenmill.model.reader import WeightReader
from tokenmill.resolution import resolve
from tokenmill.runtime.executors import EXECUTORS

_DEVICE = torch.device("cpu")


def _our_logits(checkpoint: Checkpoint, ids: list[int]) -> torch.Tensor:
    model = load_model(checkpoint, _DEVICE, 256, "ref")
    layout = build_layout(model.decoder.kv_layers(), 4)
    store = KV_STORES.get("float32")(layout, 400, _DEVICE, "ref")
    executor = EXECUTORS.get("eager")(model, store, resolve(EngineConfig()))
    return _logits(executor, layout, ids, _tables(layout, torch.Generator().manual_seed(0), len(ids)), [len(ids)])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_exported_model_computes_the_same(architecture: str, tmp_path: Path) -> None:
    def settings(writer: object) -> None:
        if architecture == "gemma3":
            writer.add_sliding_window(16)  # type: ignore[attr-defined]

    write_model(tmp_path / "model.gguf", architecture, settings)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    directory = tmp_path / "exported"
    directory.mkdir()
    tensors = {}
    for name in checkpoint.names():
        stored = checkpoint.tensor(name)
        if name == ROPE_DIVISORS:
            continue
        if len(stored.shape) == 2:
            weight = WeightReader(checkpoint).linear(name.removesuffix(".weight"), *stored.shape)
            values = weight.dequantize(0, weight.out_features)
        else:
            values = stored.data.float()
        tensors[name] = to_hf_layout(name, values, checkpoint.description).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = export_config(exported_description(checkpoint), "float32")
    (directory / "config.json").write_text(json.dumps(config))

    ids = torch.randint(5, VOCAB, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    theirs = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    for again in (checkpoint, open_checkpoint(directory)):
        got = _our_logits(again, ids)
        assert (got - expected).abs().max() < 1e-4 * expected.abs().max()
