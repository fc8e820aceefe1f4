"""Rotated models compute what they did before; where that cannot be, the rotation is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.quantize.methods.tiny_blocks import TinyModel
from tokenmill.errors import UserError
from tokenmill.quantize.calibrate import CalibratedBlock
from tokenmill.quantize.methods.rotation import Rotation


def _rotated(model: TinyModel, rotation: Rotation) -> list[CalibratedBlock]:
    rotation.begin(model.edges)
    blocks = [CalibratedBlock(model.source, index, None) for index in range(model.source.num_blocks)]
    for block in blocks:
        rotation.apply(block, {})
    return blocks


@pytest.mark.parametrize("name", ["llama", "llama-biases", "llama-tied", "qwen2", "qwen3", "mistral"])
def test_logits_stay_as_they_were(name: str, tmp_path: Path) -> None:
    model = TinyModel(name, tmp_path)
    with torch.no_grad():
        expected = model.oracle(model.ids).logits
    embedding = model.edges.weight("model.embed_tokens").clone()
    blocks = _rotated(model, Rotation())
    assert torch.allclose(model.logits(blocks), expected, atol=1e-3)
    assert not torch.allclose(model.edges.weight("model.embed_tokens"), embedding, atol=1e-2)
    assert not model.edges.description.tie_embeddings
    assert torch.equal(model.edges.weight("model.norm"), torch.ones(64))
    assert torch.equal(blocks[1].weight("model.layers.1.input_layernorm"), torch.ones(64))


def test_outliers_of_the_residual_stream_are_spread(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    states = model.edges.embed(model.ids)
    table = model.edges.weight("model.embed_tokens").clone()
    table[:, 9] += 3.0  # a channel that stands out everywhere
    model.edges.replace("model.embed_tokens", table)
    before = model.edges.embed(model.ids)
    Rotation().begin(model.edges)
    after = model.edges.embed(model.ids)
    assert torch.allclose(after.norm(dim=-1), before.norm(dim=-1), rtol=1e-4)
    assert after.abs().amax(-1).mean() < 0.8 * before.abs().amax(-1).mean()
    assert states.shape == after.shape


def test_the_seed_decides_and_repeats(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    value = "model.layers.0.self_attn.v_proj"
    first, again, other = (_rotated(model, Rotation({"seed": seed}))[0].weight(value) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other, atol=1e-3)


def test_post_norms_leave_only_the_value_heads(tmp_path: Path) -> None:
    model = TinyModel("gemma3", tmp_path)
    with pytest.raises(UserError, match="residual"):
        Rotation().begin(model.edges)
    original = [CalibratedBlock(model.source, index, None) for index in range(model.source.num_blocks)]
    blocks = _rotated(model, Rotation({"residual": False}))
    assert torch.allclose(model.logits(blocks), model.logits(original), atol=1e-3)
    value = "model.layers.2.self_attn.v_proj"
    assert not torch.allclose(blocks[2].weight(value), original[2].weight(value), atol=1e-2)
    assert model.edges.description.tie_embeddings


def test_norms_inside_attention_are_not_passed_by(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="norms inside its attention"):
        Rotation().begin(TinyModel("deepseek_v3", tmp_path).edges)
