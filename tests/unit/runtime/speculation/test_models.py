"""Drafters that are models: a second one, the target's own layers or bits, a trained head. Tokens never change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmill import LLM, SamplingParams
from tokenmill.cli.main import main
from tokenmill.engine.outputs import RequestOutput
from tokenmill.errors import CheckpointError, UserError
from tokenmill.runtime.speculation.head_modules import EagleHead
from tokenmill.runtime.speculation.length import DraftLengths
from tokenmill.runtime.speculation.page_views import PageViews
from tokenmill.runtime.speculation.training import TrainingPlan, train
from tokenmill.runtime.speculation.training_states import HiddenStates, SequenceBatch, read_hidden_states
from tokenmill.types import Request, ScheduledTokens

_OPTIONS: dict[str, Any] = {"context": 96, "page_size": 4, "threads": 1, "draft_tokens": 3, "concurrency": 4}
_PROMPTS = [
    "Once upon a time, there was a little girl named Lily. She had a red ball. She had a red",
    "One day, Tim and his dog went to the park. Tim",
    "Once upon a time, there was a little girl named Lily. She had",
]
_PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=24),
    SamplingParams(temperature=0.0, max_tokens=20, n=2, repetition_penalty=1.1),
]


class _TakeAll(DraftLengths):
    def limits(self, _requests: Any, most: Any, _num_tokens: int, _seconds: float) -> list[int]:
        return list(most)

    def choose(self, _requests: Any, drafts: Any, _num_tokens: int) -> list[int]:
        return [len(draft.token_ids) for draft in drafts]


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], Path]) -> Path:
    return model_path("stories15m")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with LLM(model, **_OPTIONS) as llm:
        return _tokens(llm.generate(_PROMPTS, _PARAMS))


@pytest.fixture(scope="module")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hardly trained: it must be usable and harmless, not good."""
    folder = tmp_path_factory.mktemp("head")
    text = folder / "text.txt"
    text.write_text(" ".join(_PROMPTS) * 4)
    arguments = ["train-draft", str(model), "--text", str(text), "--out", str(folder / "head"), "--depth", "2"]
    arguments += ["--steps", "3", "--batch", "32", "--tokens", "200", "--window", "32", "--width", "32", "--json"]
    assert main(arguments) == 0
    return folder / "head"


def _tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [each.token_ids for output in outputs for each in output.outputs]


def _drafting(model: Path, speculate: str) -> LLM:
    llm = LLM(model, speculate=speculate, **_OPTIONS)
    speculator = llm.parts.runtime.runner.speculator
    assert speculator is not None
    speculator.lengths = _TakeAll()
    return llm


@pytest.mark.parametrize("kind", ["draft", "self:layers=5", "self:q4_0"])
def test_models_as_drafters(model: Path, expected: list[list[int]], kind: str) -> None:
    with _drafting(model, f"draft:{model}" if kind == "draft" else kind) as llm:
        assert _tokens(llm.generate(_PROMPTS, _PARAMS)) == expected
        # Prefix hits: the draft model's pages came along, or are made good.
        assert _tokens(llm.generate(_PROMPTS, _PARAMS)) == expected
        scheduler = llm.parts.core.scheduler
        assert scheduler.stats.num_accepted > 10
        if kind == "draft":  # the same model: it must agree with itself, whatever happened to pages in between
            assert scheduler.stats.num_accepted == scheduler.stats.num_drafted


def test_drawn_drafts_of_the_same_model_are_all_accepted(model: Path) -> None:
    """Without a seed of its own a request's drafts are drawn, and p = q leaves nothing to refuse."""
    params = SamplingParams(temperature=1.0, top_k=50, max_tokens=24, ignore_eos=True)
    with _drafting(model, f"draft:{model}") as llm:
        output = llm.generate(_PROMPTS[0], params)[0].outputs[0]
        scheduler = llm.parts.core.scheduler
        assert len(output.token_ids) == 24
        assert scheduler.stats.num_accepted == scheduler.stats.num_drafted > 10


def test_a_head(model: Path, head: Path, expected: list[list[int]]) -> None:
    with _drafting(model, f"head:{head}") as llm:
        assert _tokens(llm.generate(_PROMPTS, _PARAMS)) == expected
        assert llm.stats.num_drafted > 10


def test_trees_from_a_head(model: Path, head: Path, expected: list[list[int]]) -> None:
    with _drafting(model, f"tree:{head}") as llm:
        assert _tokens(llm.generate(_PROMPTS, _PARAMS)) == expected
        assert llm.stats.num_drafted > 10


def test_a_head_of_another_model_is_refused(model: Path, head: Path, tmp_path: Path) -> None:
    for source in head.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    config = json.loads((tmp_path / "draft_head.json").read_text())
    (tmp_path / "draft_head.json").write_text(json.dumps(config | {"target": "llama/99x1/7"}))
    with pytest.raises(UserError, match="another model"):
        LLM(model, speculate=f"head:{tmp_path}", **_OPTIONS)
    (tmp_path / "draft_head.json").write_text("{")
    with pytest.raises(CheckpointError, match="train-draft"):
        LLM(model, speculate=f"head:{tmp_path}", **_OPTIONS)


def test_another_vocabulary_is_refused(model: Path, model_path: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match=r"another vocabulary.*same family"):
        LLM(model, speculate=f"draft:{model_path('smollm2')}", **_OPTIONS)


@pytest.mark.parametrize(
    "speculate", ["self", "self:layers=0", "self:layers=6", "self:q9", "draft", "head", "head:nowhere"]
)
def test_bad_arguments_are_refused_with_a_remedy(model: Path, speculate: str) -> None:
    with pytest.raises(UserError, match=r"self|draft|layers|q2_k|train-draft|give 1 to"):
        LLM(model, speculate=speculate, **_OPTIONS)


def test_what_a_head_sees_when_it_learns_is_what_it_sees_when_it_drafts(model: Path) -> None:
    """Two sequences, two layers: attention over kept keys and over pages."""
    sequences = [list(range(20, 33)), list(range(40, 59))]
    with LLM(model, tensors=True, **_OPTIONS) as llm:
        runtime = llm.parts.runtime
        layers = (1, 4)
        states = read_hidden_states(runtime, sequences, 96, 4, [2, 5], layers)
        views = PageViews(runtime.model, runtime.store, layers)
        batch = SequenceBatch(states, torch.tensor([0, 1]), 2, runtime.model.device)
        torch.manual_seed(1)
        d = runtime.model.decoder.description
        queries = torch.randn(len(batch.positions), 2 * d.num_heads * d.head_dim)
        learned = batch.attend(queries, layers, views.specs, views.rotary)
        rows, page = [], 0
        for sequence, first in zip(sequences, (2, 5), strict=True):
            pages = -(-len(sequence) // runtime.layout.page_size)
            for place in range(first, len(sequence) - 2):
                request = Request("r", sequence[: place + 2], SamplingParams())
                tables = (list(range(page, page + pages)),)
                rows.append(ScheduledTokens(request, place + 1, 1, tables, True))
            page += pages
        drafted = views.attend_fn(views.batch(rows))(queries)
    assert len(rows) == len(batch.positions) == 9 + 12
    assert torch.allclose(learned, drafted, atol=1e-4)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_training_learns_what_can_be_learned(model: Path, kind: str) -> None:
    """Hidden states that say what comes next: the head must read it off them."""
    with LLM(model, tensors=True, **_OPTIONS) as llm:
        loaded = llm.parts.runtime.model
        size = loaded.decoder.description.hidden_size
        torch.manual_seed(0)
        cycle = torch.tensor([300, 301, 302, 303, 304])
        ids = cycle.repeat(60)
        codes = torch.randn(5, size)
        lengths = torch.full((20,), 15)
        states = HiddenStates(
            ids, codes.repeat(60, 1).half(), lengths.cumsum(0) - 15, lengths, torch.zeros_like(lengths)
        )
        plan = TrainingPlan(kind, depth=2, width=32, layers=0, steps=25, batch=16, learning_rate=1e-2)
        losses: list[float] = []
        trained, acceptance = train(loaded, states, plan, lambda _step, loss: losses.append(float(loss)))
    assert losses[-1] < losses[0] / 2  # half of it is to be as unsure as the target
    assert min(acceptance) > 0.95
    assert isinstance(trained, EagleHead) == (kind == "eagle")
