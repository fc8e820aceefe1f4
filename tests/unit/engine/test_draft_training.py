"""A head from the model's own words: what is read, what is learned from, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tokenmill import LLM
from tokenmill.engine.draft_training import own_answers, own_text, read_prompts, train_head
from tokenmill.errors import UserError
from tokenmill.runtime.speculation.training import TrainingPlan
from tokenmill.runtime.speculation.training_states import read_hidden_states


@pytest.fixture
def llm(model_path: Callable[[str], Path]) -> LLM:
    options = {"context": 64, "threads": 1, "concurrency": 3, "batch_tokens": 40, "prefix_caching": False}
    return LLM(model_path("stories15m"), tensors=True, **options)


def test_sequences_are_read_together_as_they_are_alone(llm: LLM) -> None:
    """Several in a step, and one longer than a step; states of the answers only are learned from."""
    sequences = [list(range(20, 20 + length)) for length in (7, 12, 9, 30, 50)]
    firsts = [3, 0, 8, 10, 49]
    with llm:
        runtime = llm.parts.runtime
        together = read_hidden_states(runtime, sequences, 40, 3, firsts, [1])
        alone = [read_hidden_states(runtime, [sequence], 40, 1, layers=[1]) for sequence in sequences]
    assert together.token_ids.tolist() == [token for sequence in sequences for token in sequence]
    assert torch.allclose(together.hidden.float(), torch.cat([each.hidden for each in alone]).float(), atol=2e-2)
    assert torch.allclose(together.keys[1], torch.cat([each.keys[1] for each in alone]), atol=2e-2)
    assert torch.allclose(together.values[1], torch.cat([each.values[1] for each in alone]), atol=2e-2)
    assert together.begins.tolist() == [0, 7, 19, 28, 58]
    assert together.learnable(3).tolist() == [1, 9, 0, 17, 0]


def test_a_text_becomes_a_head_that_can_be_used(llm: LLM, model_path: Callable[[str], Path], tmp_path: Path) -> None:
    said: list[str] = []
    with llm:
        states = own_text(llm, "Once upon a time there was a small dog. It liked to run in the park. " * 20, 400, 32)
        plan = TrainingPlan("medusa", depth=2, steps=3, batch=32)
        trained = train_head(llm, states, plan, tmp_path, said.append)
        with pytest.raises(UserError, match="chat template"):
            own_answers(llm, ["Hello"], 100, 20)
        with pytest.raises(UserError, match="medusa"):
            train_head(llm, states, TrainingPlan("tree"), tmp_path)
    assert trained.tokens > 100
    assert len(trained.acceptance) == 2
    assert len(said) == 3
    with LLM(model_path("stories15m"), context=64, threads=1, speculate=f"head:{tmp_path}") as drafting:
        assert drafting.generate("Once upon a time")[0].outputs[0].token_ids


@pytest.mark.parametrize(
    "content", ["", "{", '{"text": "no prompt"}', '{"turns": []}', '{"prompt": ""}', '{"prompt": 3}']
)
def test_files_without_prompts_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match="prompt"):
        read_prompts(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_prompts(tmp_path / "nowhere")


def test_prompts_and_first_turns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join([json.dumps({"prompt": "one"}), "", json.dumps({"turns": ["two", "three"]})]))
    assert read_prompts(path) == ["one", "two"]
