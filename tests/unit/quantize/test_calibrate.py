"""The calibration forward pass is the model: same logits as transformers and as the engine; statistics are exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.parity.tiny_models import WRITTEN, make
from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.kernels.ref import rms_norm, softcap
from tokenmill.quantize import calibrate
from tokenmill.quantize.base import SAMPLE_ROWS
from tokenmill.quantize.calibrate import CalibratedBlock, HiddenStates, StatisticsCollector
from tokenmill.quantize.source import HEAD, SourceModel

_LENGTH = 40


def _logits(source: SourceModel, ids: torch.Tensor, batch: int) -> torch.Tensor:
    states = HiddenStates(source.embed(ids), batch)
    for index in range(source.num_blocks):
        CalibratedBlock(source, index, states).advance()
    x = source.decoder.norm.of_tensor(states.values.flatten(0, 1)).view_as(states.values)
    logits = x @ source.read_edge(HEAD).T * source.description.logit_scale
    cap = source.description.logit_softcap
    return softcap(logits, cap) if cap else logits


@pytest.mark.parametrize("name", WRITTEN)
def test_logits_match_transformers(name: str, tmp_path: Path) -> None:
    oracle = make(name, tmp_path)
    ids = torch.randint(0, 131, (3, _LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = oracle(ids).logits
        found = _logits(SourceModel(open_checkpoint(tmp_path), _LENGTH), ids, batch=2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("alias", ["stories15m", "smollm2", "gemma3-270m"])
def test_logits_match_the_engine(alias: str, model_path: Callable[[str], Path]) -> None:
    """GGUF stores llama's rotary pairs and Gemma's norms otherwise: methods see one layout, with the same results."""
    path = model_path(alias)
    with LLM(str(path), context=64, kernels="ref", executor="eager") as llm:
        ids = llm.parts.tokenizer.encode("The quick brown fox jumps over the lazy dog, and then it sleeps.")
        output = llm.generate([ids], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))[0]
    assert output.prompt_logprobs is not None
    with torch.no_grad():
        found = _logits(SourceModel(open_checkpoint(path), len(ids)), torch.tensor([ids]), 1)[0].log_softmax(-1)
    for position, entries in enumerate(output.prompt_logprobs):
        if entries:
            token = ids[position]
            assert entries[token].logprob == pytest.approx(float(found[position - 1, token]), abs=2e-3)


@pytest.fixture(scope="module")
def block_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], CalibratedBlock]:
    folder = tmp_path_factory.mktemp("model")
    make("qwen2", folder)
    source = SourceModel(open_checkpoint(folder), _LENGTH)
    ids = torch.randint(0, 131, (5, _LENGTH), generator=torch.Generator().manual_seed(1))
    return lambda: CalibratedBlock(source, 1, HiddenStates(source.embed(ids), 2))


def test_statistics_are_those_of_the_inputs(
    block_of: Callable[[], CalibratedBlock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "_HESSIAN_TILE", 24)  # 64 inputs: two whole tiles and a short one
    block = block_of()
    norm = block.weight("model.layers.1.input_layernorm")
    rows = rms_norm(torch.cat(list(block.inputs())), norm, 1e-6)
    found = block.statistics(block.groups[0], calibrate.KINDS)
    assert found.num_tokens == 5 * _LENGTH
    torch.testing.assert_close(found.hessian, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.mean_square, rows.square().mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.mean_abs, rows.abs().mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.max_abs, rows.abs().amax(0))
    torch.testing.assert_close(found.sample, rows)  # fewer rows than a sample has


def test_statistics_follow_replaced_weights(block_of: Callable[[], CalibratedBlock]) -> None:
    block = block_of()
    output = block.groups[1]
    before = block.statistics(output, ("mean_square",)).mean_square
    name = block.groups[0].names[2]
    block.replace(name, block.weight(name) * 2)
    block.replace_bias(name, block.bias(name) * 2)  # type: ignore[operator]
    after = block.statistics(output, ("mean_square",)).mean_square
    assert before is not None
    torch.testing.assert_close(after, before * 4, rtol=1e-4, atol=1e-7)


def test_survey_gives_every_group_in_one_pass(block_of: Callable[[], CalibratedBlock]) -> None:
    one, all_at_once = block_of(), block_of()
    found = all_at_once.survey(("mean_square",))
    for group in one.groups:
        expected = one.statistics(group, ("mean_square",)).mean_square
        for name in group.names:
            torch.testing.assert_close(found[name].mean_square, expected)
    one.advance()
    torch.testing.assert_close(torch.stack(list(all_at_once.inputs())), torch.stack(list(one.inputs())))


def test_forward_has_gradients(block_of: Callable[[], CalibratedBlock]) -> None:
    block = block_of()
    name = "model.layers.1.self_attn.q_proj"
    weight = block.weight(name).clone().requires_grad_()
    block.forward(block.inputs()[0], {name: weight}).square().sum().backward()
    assert weight.grad is not None
    assert float(weight.grad.abs().max()) > 0


def test_sample_is_spread_over_the_tokens() -> None:
    count = 10 * SAMPLE_ROWS
    collector = StatisticsCollector(1, count, ("sample",))
    for begin in range(0, count, 100):
        collector.add(torch.arange(begin, min(begin + 100, count)).float().unsqueeze(1))
    sample = collector.finish().sample
    assert sample is not None
    assert sample.flatten().tolist() == list(range(0, count, 10))
