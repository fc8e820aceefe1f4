"""The metric of block outputs: directions it calls dear move the model's answers more than those it calls cheap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.quantize.methods.tiny_blocks import LENGTH, TinyModel
from tokenmill.quantize.calibrate import CalibratedBlock, HiddenStates
from tokenmill.quantize.divergence import head_logits, run_block
from tokenmill.quantize.edges import Edges, JobData
from tokenmill.quantize.fisher import gram_bytes, linear_grams, output_roots
from tokenmill.quantize.methods.rotation import Rotation
from tokenmill.quantize.source import HEAD


def divergence(model: TinyModel, changed: int, change: Tensor) -> float:
    """Of the answers when `change` is added to what block `changed` puts out."""
    source, found = model.source, []
    for added in (torch.zeros_like(change), change):
        states = source.embed(model.ids).flatten(0, 1)
        for index in range(source.num_blocks):
            states = run_block(source, index, states, source.read_block(index), LENGTH)
            states = states + added if index == changed else states
        logits = head_logits(source, source.decoder.norm.of_tensor(states), source.read_edge(HEAD))
        found.append(logits.log_softmax(-1))
    return float((found[0].exp() * (found[0] - found[1])).sum(-1).mean())


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_dear_directions_move_the_answers_more_than_cheap_ones(name: str, tmp_path: Path) -> None:
    model = TinyModel(name, tmp_path)
    roots = output_roots(model.source, model.ids)
    assert len(roots) == model.source.num_blocks
    for index, root in enumerate(roots):
        torch.testing.assert_close(root, root.T)
        assert float(root.square().sum() / len(root)) == pytest.approx(1.0, abs=0.02)  # as dear as plain, on average
        values, vectors = torch.linalg.eigh(root)
        assert float(values.min()) > 0  # nothing is free
        size = 0.05 * model.source.embed(model.ids).std()
        signs = torch.randn(model.ids.numel(), 1, generator=torch.Generator().manual_seed(3))
        cheap, dear = (signs * vectors[:, at] * size for at in (0, -1))
        assert divergence(model, index, dear) > 1.5 * divergence(model, index, cheap)


def test_it_repeats(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    for one, other in zip(*(output_roots(model.source, model.ids) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("model_name", "options"),
    [("llama", {}), ("llama", {"residual": False}), ("llama", {"heads": False}), ("qwen3_next", {"residual": False})],
)
def test_an_error_costs_the_same_in_a_rotated_model(model_name: str, options: dict[str, bool], tmp_path: Path) -> None:
    """tr(G D A D^T) of an error of any linear, before and after everything in it is rotated."""
    model, rotation = TinyModel(model_name, tmp_path), Rotation(options)
    data = JobData(model.ids, 6, torch.device("cpu"), {})
    grams = Edges(model.source, data).linear_grams()
    edges = Edges(model.source, data)
    rotation.begin(edges)
    turned = edges.linear_grams()
    generator = torch.Generator().manual_seed(5)
    states = [HiddenStates(each.embed(model.ids), batch=6) for each in (model.edges, edges)]
    changed = set()
    for index in range(model.source.num_blocks):
        blocks = [CalibratedBlock(model.source, index, each) for each in states]
        moved = CalibratedBlock(model.source, index, None)
        rotation.apply(blocks[1], {})
        errors = {
            name: torch.randn(moved.weight(name).shape, generator=generator) for g in moved.groups for name in g.names
        }
        for name, error in errors.items():
            moved.replace(name, moved.weight(name) + error)
        rotation.apply(moved, {})
        for group in blocks[0].groups:
            before, after = (each.statistics(group, ("hessian",)).hessian for each in blocks)
            assert before is not None
            assert after is not None
            for name in group.names:
                error = moved.weight(name) - blocks[1].weight(name)
                cost = ((grams[name] @ errors[name] @ before) * errors[name]).sum()
                torch.testing.assert_close(((turned[name] @ error @ after) * error).sum(), cost, rtol=1e-3, atol=0)
                if not torch.allclose(grams[name], turned[name], rtol=1e-2):
                    changed.add(name.rpartition(".")[2])
        for block in blocks:
            block.advance()
    residual, heads = options.get("residual", True), options.get("heads", True)
    heads = heads and model_name == "llama"  # the values of others pass a gate before o_proj, so that heads stay
    assert changed == {*(["o_proj", "down_proj"] if residual else []), *(["v_proj"] if heads else [])}


def test_grams_of_linears_weigh_what_their_outputs_change(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    grams = linear_grams(model.source, model.ids)
    assert set(grams) == set(model.source.layer_linears())
    assert sum(gram.nbytes for gram in grams.values()) == gram_bytes(model.source)
    for name, gram in grams.items():
        assert gram.shape == (model.source.shape(name)[0],) * 2
        torch.testing.assert_close(gram, gram.T)
        assert float(torch.linalg.eigvalsh(gram).min()) > -1e-4 * float(gram.diagonal().mean())
    last = model.source.num_blocks - 1  # what down_proj adds is what its block puts out
    gram = grams[next(name for name in grams if f".{last}." in name and name.endswith("down_proj"))]
    root = output_roots(model.source, model.ids)[last]
    alike = torch.nn.functional.cosine_similarity(gram.flatten(), (root @ root).flatten(), dim=0)
    assert float(alike) > 0.95
