"""Which models the engine runs: matrices as described, others declined by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.tiny_models import CONFIGS, make
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


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "mistral", "deepseek-v2", "deepseek-v3"])
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
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, r"'mixtral'.*\(experts\)"),
        ({"hidden_act": "relu"}, r"'llama'.*\(activation 'relu'\)"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope scaling 'longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial rotary embedding"),
        ({"use_bidirectional_attention": True}, "bidirectional attention"),
        ({"model_type": "phi3"}, "'phi3' is not supported yet"),
        (
            {
                "model_type": "deepseek_v3",
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "v_head_dim": 8,
            },
            r"'deepseek_v3'.*\(experts\)",
        ),
        ({"model_type": "mamba", "state_size": 8, "expand": 2}, r"\(Mamba layers, layers without an MLP\)"),
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
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mamba", "state_size": 8, "expand": 2}))
    for read in (lambda: SourceModel(open_checkpoint(tmp_path), 8), lambda: ConvertSource(tmp_path)):
        with pytest.raises(CheckpointError, match="'mamba' is not supported yet"):
            read()


def test_an_architecture_must_know_all_features() -> None:
    """Gemma's block norms twice, the plain decoder's does not: a description must not get the wrong one."""
    gemma = describe(CONFIGS["gemma3"]().to_dict())
    with pytest.raises(CheckpointError, match="norms before and after each half"):
        architecture_of(replace(gemma, architecture="llama"))
