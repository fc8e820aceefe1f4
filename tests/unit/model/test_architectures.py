"""Which models the engine runs: matrices as described, others declined by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.tiny_models import CONFIGS, make
from tests.parity.tiny_recurrent import RECURRENT
from tokenmill.checkpoint.hf_config import describe
from tokenmill.checkpoint.matrices import edge_matrices, layer_matrices
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import CheckpointError
from tokenmill.model.architectures import architecture_of
from tokenmill.model.loader import load_model
from tokenmill.quantize.convert_source import ConvertSource
from tokenmill.quantize.source import SourceModel

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen2",
        "qwen3",
        "gemma3",
        "mistral",
        "phi3",
        "gpt2",
        "falcon-40b",
        "cohere",
        "deepseek_v2-yarn",
        "deepseek_v3-yarn",
    ],
)
def test_described_matrices_are_the_loaded_ones(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    model = load_model(checkpoint, torch.device("cpu"), 8, "ref")
    d = checkpoint.description
    described = {matrix.name: (matrix.outputs, matrix.inputs) for matrix in edge_matrices(d)}
    for number, layer in enumerate(d.layers):
        for matrix in layer_matrices(d.hidden_size, layer):
            described[f"model.layers.{number}.{matrix.name}"] = (matrix.outputs, matrix.inputs)
    assert described == {name: (w.out_features, w.in_features) for name, w in model.weights.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tiny_model_is_run(name: str) -> None:
    assert architecture_of(describe(CONFIGS[name]().to_dict()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "mish"}, r"'llama'.*\(activation 'mish'\)"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ({"model_type": "falcon", "alibi": True}, r"'falcon'.*ALiBi"),
        ({"use_bidirectional_attention": True}, "bidirectional attention"),
        ({"model_type": "opt"}, "'opt' is not supported yet"),
        ({"model_type": "llama", "layer_types": None, "attn_layer_indices": [0], "expand": 2}, r"\(Mamba layers\)"),
    ],
)
def test_what_is_not_run_is_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason) as caught:
        architecture_of(describe({**LLAMA, **changes}))
    assert "plan" in caught.value.remedy
    assert "\n" not in str(caught.value)


def test_the_quantizer_declines_by_the_same_name(tmp_path: Path) -> None:
    make("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "rwkv7"}))
    for read in (lambda: SourceModel(open_checkpoint(tmp_path), 8), lambda: ConvertSource(tmp_path)):
        with pytest.raises(CheckpointError, match="'rwkv7' is not supported yet"):
            read()


@pytest.mark.parametrize("name", RECURRENT)
def test_described_matrices_of_recurrent_models_are_the_loaded_ones(name: str, tmp_path: Path) -> None:
    """By shape: families name them differently, and Granite's hybrid joins gate and up. The gate of a shared expert
    is a vector."""
    make(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    loaded = load_model(checkpoint, torch.device("cpu"), 8, "ref").weights.values()
    d = checkpoint.description
    described = [*edge_matrices(d), *(each for layer in d.layers for each in layer_matrices(d.hidden_size, layer))]
    assert sum(each.parameters for each in described) == sum(
        w.out_features * w.in_features for w in loaded if w.out_features > 1
    )


def test_an_architecture_must_know_all_features() -> None:
    """A description must not get a decoder that would compute something else."""
    llama = describe(CONFIGS["llama"]().to_dict())
    with pytest.raises(CheckpointError, match="alternating updates"):
        architecture_of(replace(llama, other_features=("alternating updates",)))
