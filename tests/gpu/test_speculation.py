"""Drafts on the GPU executors: checked as rows of a decode step; tokens are those without drafts, up to near ties.

test_interpreted.py runs this file in a process of its own where there is no GPU.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.gpu.test_executors import LENGTH, ON_GPU, config, engine, prompts
from tokenmill import SamplingParams
from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation.base import Drafter, Target
from tokenmill.runtime.speculation.length import DraftLengths
from tokenmill.types import Request, ScheduledTokens

LENGTHS = LENGTH + 2


class Oracle(Drafter):
    name = "oracle"

    def __init__(self, futures: list[tuple[list[int], list[int]]]) -> None:
        self._futures = futures
        self._random = random.Random(2)

    @classmethod
    def build(cls, argument: str, target: Target) -> Oracle:
        raise NotImplementedError

    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        return [self._draft(row.request, limit) for row, limit in zip(rows, limits, strict=True)]

    def _draft(self, request: Request, limit: int) -> Draft:
        future = next(output for prompt, output in self._futures if prompt == request.prompt_ids)
        guess = future[request.num_output_tokens :][:limit]
        if guess and self._random.random() < 0.3:
            guess[-1] = (guess[-1] + 1) % 131
        return Draft(guess, [0.5] * len(guess))


class TakeAll(DraftLengths):
    def choose(self, _requests: Sequence[Request], drafts: Sequence[Draft], _num_tokens: int) -> list[int]:
        return [len(draft.token_ids) for draft in drafts]


@pytest.mark.parametrize("executor", ["cuda_graph", "cuda_eager"] if ON_GPU else ["cuda_graph"])
def test_drafts_change_nothing(tmp_path: Path, executor: str) -> None:
    folder = config(tmp_path)
    asked = prompts(3, 9)
    params = [
        SamplingParams(temperature=0.0, max_tokens=LENGTHS, ignore_eos=True),
        SamplingParams(temperature=0.8, top_k=20, seed=7, max_tokens=LENGTHS, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=LENGTHS, ignore_eos=True, repetition_penalty=1.3),
    ]
    with engine(folder, executor) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(asked, params)]
    with engine(folder, executor, speculate="ngram", draft_tokens=3) as llm:
        speculator = llm.parts.runtime.runner.speculator
        assert speculator is not None
        speculator.drafter, speculator.lengths = Oracle(list(zip(asked, plain, strict=True))), TakeAll()
        drafted = [output.outputs[0].token_ids for output in llm.generate(asked, params)]
        assert llm.stats.num_accepted > 3
        llm.parts.core.scheduler.kv.check()
    assert drafted == plain


def test_hidden_states_reach_a_drafter_that_wants_them(tmp_path: Path) -> None:
    """With and without drafts, and the same ones from both executors."""
    folder, (prompt, *_) = config(tmp_path), prompts(1, 9)
    params = SamplingParams(temperature=0.0, max_tokens=LENGTHS, ignore_eos=True)
    seen: dict[str, list[list[float]]] = {}
    for executor in ("cuda_graph", "cuda_eager"):
        with engine(folder, executor, speculate="ngram", draft_tokens=3) as llm:
            runner = llm.parts.runtime.runner
            assert runner.speculator is not None
            runner.speculator.lengths = TakeAll()  # not by measured times, which differ between executors
            states = seen[executor] = []
            drafter = runner.speculator.drafter
            drafter.needs_hidden = True
            runner.executor.attach_drafter(needs_hidden=True, guesser=None)
            drafter.observe = lambda _row, _count, hidden, states=states: states.append(  # type: ignore[method-assign,misc]
                hidden.float().tolist()
            )
            llm.generate([prompt], params)
    first, second = seen.values()
    assert 0 < len(first) == len(second) <= LENGTHS
    for one, other in zip(first, second, strict=True):
        assert one == pytest.approx(other, abs=0.05, rel=0.05)
