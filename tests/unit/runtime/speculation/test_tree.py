"""Trees of drafts on a real model: whatever branches are offered, the output is what it is without them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.parity.tiny_models import make
from tokenmill import LLM, SamplingParams
from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation.base import Drafter, Target
from tokenmill.runtime.speculation.length import DraftLengths
from tokenmill.types import Request, ScheduledTokens

_OPTIONS: dict[str, Any] = {"context": 96, "page_size": 4, "threads": 1, "kernels": "ref", "executor": "eager"}
_PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True),
]


class _TreeOracle(Drafter):
    """The truth hidden among wrong branches, in random order."""

    name = "tree oracle"

    def __init__(self, futures: list[tuple[list[int], list[int]]]) -> None:
        self._futures = futures
        self._random = random.Random(4)

    @classmethod
    def build(cls, argument: str, target: Target) -> _TreeOracle:
        raise NotImplementedError

    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        return [self._draft(row.request, limit) for row, limit in zip(rows, limits, strict=True)]

    def _draft(self, request: Request, limit: int) -> Draft:
        future: list[int] = next((output for prompt, output in self._futures if prompt == request.prompt_ids), [])
        truth = future[request.num_output_tokens :]
        draft, node = Draft(parents=[]), -1
        assert draft.parents is not None
        while len(draft.token_ids) < limit:
            lies = self._random.randrange(3)
            siblings = [*(3 + self._random.randrange(100) for _ in range(lies)), *truth[:1]]
            self._random.shuffle(siblings)
            siblings = siblings[: limit - len(draft.token_ids)]
            if not siblings:
                break
            parent = node
            for token_id in siblings:
                if truth and token_id == truth[0]:
                    node = len(draft.token_ids)
                draft.token_ids.append(token_id)
                draft.confidences.append(0.5)
                draft.parents.append(parent)
            truth = truth[1:] if node != parent else []
        return draft


class _TakeAll(DraftLengths):
    def choose(self, _requests: Sequence[Request], drafts: Sequence[Draft], _num_tokens: int) -> list[int]:
        return [len(draft.token_ids) for draft in drafts]


_RECORDED: dict[str, Any] = _OPTIONS | {"kernels": "", "executor": "recorded"}
_CODED: dict[str, Any] = _RECORDED | {"kv_cache_dtype": "int8"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("stories15m", _OPTIONS),
        ("gemma3", _OPTIONS),
        ("stories15m", _RECORDED),
        ("gemma3", _RECORDED),
        ("stories15m", _CODED),
        ("deepseek_v3", _OPTIONS),
        ("deepseek_v3", _RECORDED),
    ],
    ids=[
        "reference",
        "reference-windows",
        "recorded",
        "recorded-windows",
        "recorded-int8",
        "reference-latent",
        "recorded-latent",
    ],
)
def test_branches_change_nothing(
    name: str, options: dict[str, Any], model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """Full attention, and sliding windows shorter than the output."""
    folder = model_path("stories15m")
    if name != "stories15m":
        source, folder = folder, tmp_path
        make(name, folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_text((source / file).read_text())
    prompts = [[1, 20, 21, 22, 23, 24, 25], [1, 40, 41, 42]]
    with LLM(folder, **options) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(prompts, _PARAMS)]
    with LLM(folder, speculate="ngram", draft_tokens=9, **options) as llm:
        parts = llm.parts.runtime
        speculator = parts.runner.speculator
        assert speculator is not None
        assert parts.executor.takes_trees
        speculator.drafter = _TreeOracle(list(zip(prompts, plain, strict=True)))
        speculator.lengths = _TakeAll()
        drafted = [output.outputs[0].token_ids for output in llm.generate(prompts, _PARAMS)]
        llm.parts.core.scheduler.kv.check()
        assert llm.stats.num_accepted > 15
        # Cached pages hold the accepted branch: a longer prompt that begins like the output finds it so.
        longer = prompts[0] + plain[0]
        again = llm.generate([longer], _PARAMS[0])[0]
        assert again.num_cached_tokens > len(prompts[0]) + 8
    # Where pages hold codes, a last bit of a sum that was added in another order may move a code, and a draw with it.
    compared = 1 if options is _CODED else 2
    assert drafted[:compared] == plain[:compared]
    with LLM(folder, prefix_caching=False, **options) as llm:
        assert llm.generate([longer], _PARAMS[0])[0].outputs[0].token_ids == again.outputs[0].token_ids


def test_a_tree_straightened_is_its_first_branch() -> None:
    draft = Draft([5, 6, 7, 8], [0.9, 0.8, 0.7, 0.6], parents=[-1, -1, 0, 2])
    assert draft.depths() == [0, 0, 1, 2]
    draft.straighten()
    assert draft.token_ids == [5, 7, 8]
    assert draft.parents is None
