"""Drafters of one published layer under test: a tiny target, every draft recorded, and drafts that hold at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.runtime.speculation.test_models import _TakeAll
from tokenmill import LLM, SamplingParams
from tokenmill.runtime.executors.base import Draft
from tokenmill.types import ScheduledTokens

OPTIONS: dict[str, Any] = {"context": 128, "page_size": 4, "threads": 1, "draft_tokens": 3, "concurrency": 4}
PROMPTS = [
    " ".join(f"w{3 + (7 * n + n * n) % 120}" for n in range(30)),
    " ".join(f"w{5 + (11 * n) % 100}" for n in range(17)),
    " ".join(f"w{3 + (7 * n + n * n) % 120}" for n in range(22)) + " w9 w8 w7",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=36, ignore_eos=True)


class Recorder:
    """Stands between speculator and drafter: keeps what was drafted for which tokens, and then proposes what comes, in
    part, so that drafts hold and fail."""

    def __init__(self, llm: LLM, futures: list[list[int]]) -> None:
        speculator = llm.parts.runtime.runner.speculator
        assert speculator is not None
        speculator.lengths = _TakeAll()
        self.drafter: Any = speculator.drafter
        self._draft = self.drafter.draft
        setattr(self.drafter, "draft", self.draft)  # noqa: B010 (an instance, not a class)
        self._futures, self._random = futures, random.Random(3)
        self.num_preemptions = 0
        self.records: list[tuple[list[int], Draft]] = []

    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        drafts = self._draft(rows, limits)
        for row, draft in zip(rows, drafts, strict=True):
            if draft.token_ids:
                ids = list(row.request.token_ids)
                self.records.append((ids, Draft(list(draft.token_ids), list(draft.confidences))))
                self._improve(ids, draft)
        return drafts

    def _improve(self, ids: list[int], draft: Draft) -> None:
        future = next(each for each in self._futures if each[: len(ids)] == ids)
        for place, token_id in zip(range(len(draft.token_ids)), future[len(ids) :], strict=False):
            if self._random.random() < 0.6:
                draft.token_ids[place] = token_id


def whole(outputs: list[Any]) -> list[list[int]]:
    """Prompt and output of each."""
    return [[*output.prompt_token_ids, *each.token_ids] for output in outputs for each in output.outputs]


def check_drafts(records: list[tuple[list[int], Draft]], reference: Any) -> None:
    """`reference(ids, depth)`: [depth, vocab] probabilities of the chain of greedy drafts behind `ids`."""
    assert len(records) > 20
    for ids, draft in records[::5]:
        expected = reference(ids, len(draft.token_ids))
        assert [int(row.argmax()) for row in expected] == draft.token_ids
        assert [float(row.max()) for row in expected] == pytest.approx(draft.confidences, abs=2e-3)


def run_recorded(model: Path, speculate: str, expected: list[list[int]], **options: Any) -> tuple[Recorder, int, int]:
    """Generates with drafts, asserts that nothing changed; the recorder, drafted and accepted tokens."""
    with LLM(model, speculate=speculate, **{**OPTIONS, **options}) as llm:
        recorder = Recorder(llm, expected)
        assert whole(llm.generate(PROMPTS, GREEDY)) == expected
        recorder.num_preemptions = llm.stats.num_preemptions
        return recorder, llm.stats.num_drafted, llm.stats.num_accepted
