"""The divergence of a changed model: that of its logits computed whole, whatever was changed, several at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.quantize.methods.tiny_blocks import TinyModel
from tokenmill.quantize.divergence import BlockWeights, DivergenceProbe
from tokenmill.quantize.source import EMBEDDING

Q, DOWN, LATE = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("cache", [0, 1 << 30])
def test_it_is_the_kl_of_the_whole_models_logits(cache: int, tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    probe = DivergenceProbe(model.source, model.ids, BlockWeights(model.source, cache))
    generator = torch.Generator().manual_seed(1)

    def moved(name: str) -> torch.Tensor:
        weight = model.source.read_edge(name)
        return weight + 0.05 * torch.randn(weight.shape, generator=generator)

    changes = [{Q: moved(Q)}, {LATE: moved(LATE)}, {Q: moved(Q), DOWN: moved(DOWN), LATE: moved(LATE)}, {}]
    found = probe.measure(changes)
    blocks = [model.block(index) for index in range(model.source.num_blocks)]
    plain = model.logits(blocks).log_softmax(-1)[:, 4:]
    for change, divergence in zip(changes, found, strict=True):
        blocks = [model.block(index) for index in range(model.source.num_blocks)]
        for name, value in change.items():
            blocks[int(name.split(".")[2])].replace(name, value)
        changed = model.logits(blocks).log_softmax(-1)[:, 4:]
        expected = float((plain.exp() * (plain - changed)).sum(-1).mean())
        assert divergence == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert found[3] == 0.0 < min(found[:3])


def test_an_embedding_counts_at_both_ends_where_it_is_tied(tmp_path: Path) -> None:
    model = TinyModel("gemma3", tmp_path)
    probe = DivergenceProbe(model.source, model.ids, BlockWeights(model.source, 0))
    table = model.source.read_edge(EMBEDDING)
    (whole,) = probe.measure([{EMBEDDING: table + 0.05 * torch.randn_like(table)}])
    assert whole > 0
    assert probe.measure([{EMBEDDING: table}]) == [pytest.approx(0.0, abs=1e-6)]
