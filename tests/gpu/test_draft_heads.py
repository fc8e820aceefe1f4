"""Heads that guess inside the steps that check drafts, and steps queued before the host has seen the last one: on a GPU
if there is one, else under Triton's interpreter (test_interpreted.py runs this file so)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.models import write_config
from tests.gpu.test_executors import ON_GPU, config, engine, prompts, same_weights  # noqa: F401
from tokenmill import LLM, SamplingParams
from tokenmill.runtime.cuda_checks import Checks
from tokenmill.runtime.spec.captured_heads import CapturedHead
from tokenmill.runtime.spec.head_modules import HEADS
from tokenmill.runtime.spec.heads import HeadDrafter
from tokenmill.runtime.spec.training import TrainingPlan, save_head

LENGTH = 40 if ON_GPU else 9
DEPTH = 2


def make_head(folder: Path, llm: LLM, kind: str) -> str:
    torch.manual_seed(3)
    plan = TrainingPlan(kind, depth=DEPTH, width=32)
    size = llm.parts.description.hidden_size
    head = HEADS[kind](size, DEPTH, 32)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    save_head(head, llm.parts.runtime.model, plan, [0.5] * DEPTH, folder)
    return f"head:{folder}"


class Bigrams:
    """Guesses what followed a token last time: mostly right where a model repeats itself."""

    depth = DEPTH

    def __init__(self, outputs: list[list[int]], where: torch.device) -> None:
        self._next = torch.zeros(131, dtype=torch.int64)
        for ids in outputs:
            self._next[ids[:-1]] = torch.tensor(ids[1:])
        self._next = self._next.to(where)

    def guess(self, hidden: Tensor, last: Tensor) -> Tensor:  # noqa: ARG002
        found = []
        for _ in range(self.depth):
            last = self._next[last]
            found.append(last)
        return torch.stack(found, 1)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_captured_head_guesses_what_the_head_guesses(tmp_path: Path, kind: str) -> None:
    with engine(config(tmp_path / "model"), "cuda_graph") as llm:
        speculate = make_head(tmp_path / "head", llm, kind)
    with engine(tmp_path / "model", "cuda_graph", speculate=speculate) as llm:
        runtime = llm.parts.runtime
        assert runtime.runner.speculator is not None
        drafter = runtime.runner.speculator.drafter
        assert isinstance(drafter, HeadDrafter)
        hidden = torch.randn(5, llm.parts.description.hidden_size, device=runtime.model.where).bfloat16()
        last = torch.tensor([3, 9, 14, 100, 0], device=hidden.device)
        wanted, _ = drafter._guess(hidden.float(), last, DEPTH)
        found = CapturedHead(drafter.head, runtime.model, DEPTH).guess(hidden, last).tolist()
        same = [a == b for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True)]
        assert sum(same) >= len(same) - 2  # bf16 may decide a near tie otherwise


@pytest.mark.parametrize("together", [1, 2] if ON_GPU else [2])
def test_drafts_made_in_the_step_change_nothing(tmp_path: Path, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_config(tmp_path / "model", **({} if ON_GPU else {"num_hidden_layers": 1}))
    asked = prompts(2, 9)[:together]
    params = [
        SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=3, seed=5, max_tokens=LENGTH - 3, ignore_eos=True),
    ][:together]
    with engine(folder, "cuda_graph", page_size=4) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(asked, params)]
        speculate = make_head(tmp_path / "head", llm, "eagle")
    followed: list[bool] = []
    expected = Checks.are_expected
    monkeypatch.setattr(Checks, "are_expected", lambda *args: followed.append(expected(*args)) or followed[-1])
    with engine(folder, "cuda_graph", page_size=4, speculate=speculate, draft_tokens=DEPTH) as llm:
        runtime: Any = llm.parts.runtime
        runtime.executor.draft_with(Bigrams(plain, runtime.model.where))
        runtime.runner.speculator.lengths.pay = lambda requests, _depth, _tokens: bool(requests)
        drafted = [output.outputs[0].token_ids for output in llm.generate(asked, params)]
        llm.parts.core.scheduler.kv.check()
        assert llm.parts.core.scheduler.num_accepted > 3
    assert drafted == plain
    assert sum(followed) > len(followed) // 2 > 0  # most steps were queued before they were asked for


def test_a_request_that_ends_or_joins_drops_the_queued_step(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", **({} if ON_GPU else {"num_hidden_layers": 1}))
    first, second = prompts(2, 9)
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    with engine(folder, "cuda_graph") as llm:
        alone = llm.generate([first], params)[0].outputs[0].token_ids
        speculate = make_head(tmp_path / "head", llm, "eagle")
    with engine(folder, "cuda_graph", speculate=speculate, draft_tokens=DEPTH) as llm:
        runtime: Any = llm.parts.runtime
        runtime.executor.draft_with(Bigrams([alone], runtime.model.where))
        runtime.runner.speculator.lengths.pay = lambda requests, _depth, _tokens: bool(requests)
        core, intake = llm.parts.core, llm.parts.intake
        core.add(intake.request(first, params, "one"))
        found: list[int] = []
        step = 0
        while core.has_work:
            step += 1
            if step == 3:
                core.add(intake.request(second, params, "two"))
            if step == 5:
                core.cancel("two")
            found += [token for event in core.step() if event.request_id == "one" for token in event.token_ids]
        assert found == alone
        assert runtime.executor.num_dropped >= 1
        core.scheduler.kv.check()
