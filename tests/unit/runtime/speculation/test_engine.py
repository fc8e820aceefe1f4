"""The whole engine with drafts: every request gives the tokens, log-probabilities and end that it gives without.

Drafts come from the lookup drafters and from one that knows the future and lies at random, taken at any length.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.runtime.speculation.outputs import summary
from tokenmill import LLM, SamplingParams
from tokenmill.engine.outputs import RequestOutput
from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation.base import Drafter, Target
from tokenmill.runtime.speculation.length import DraftLengths
from tokenmill.types import Request, ScheduledTokens, StructuredSpec

_OPTIONS: dict[str, Any] = {"context": 96, "page_size": 4, "kernels": "ref", "executor": "eager", "threads": 1}
_STORY = (
    "Once upon a time, there was a little girl named Lily. She had a red ball. "
    "Once upon a time, there was a little girl named Lily. She had a"
)
_SCHEMA = StructuredSpec("json_schema", '{"type":"object","properties":{"name":{"enum":["Lily","Tim"]},"toys":'
    '{"type":"array","items":{"enum":["ball","car"]},"maxItems":3}},"required":["name","toys"],'
    '"additionalProperties":false}')  # fmt: skip

_REQUESTS: list[tuple[str, SamplingParams]] = [
    (_STORY, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)),
    (_STORY, SamplingParams(temperature=0.0, max_tokens=16, logprobs=2, repetition_penalty=1.2)),
    (_STORY, SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=5, max_tokens=20)),
    (_STORY[:60], SamplingParams(temperature=1.0, min_p=0.05, seed=9, n=2, max_tokens=12)),
    (_STORY[:110], SamplingParams(temperature=0.0, max_tokens=20, stop=("ball", "day"))),
    (_STORY, SamplingParams(temperature=0.0, max_tokens=20, min_tokens=5, structured=_SCHEMA)),
    (_STORY, SamplingParams(temperature=1.2, seed=3, max_tokens=20, structured=_SCHEMA)),
    (_STORY[:50], SamplingParams(temperature=0.0, max_tokens=1)),
    (_STORY[:50], SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)),  # up to the end of the context
    (_STORY[:90], SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=1, logit_bias={20: 3.0})),
]


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], Path]) -> Path:
    return model_path("stories15m")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[RequestOutput]:
    with LLM(model, **_OPTIONS) as llm:
        return llm.generate([text for text, _ in _REQUESTS], [params for _, params in _REQUESTS])


class _Oracle(Drafter):
    """Knows what comes, and errs at random."""

    name = "oracle"

    def __init__(self, outputs: list[RequestOutput], accuracy: float) -> None:
        self._futures = [(out.prompt_token_ids, each.token_ids) for out in outputs for each in out.outputs]
        self._accuracy = accuracy
        self._random = random.Random(1)

    @classmethod
    def build(cls, argument: str, target: Target) -> _Oracle:
        raise NotImplementedError

    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        return [self._draft(row.request, limit) for row, limit in zip(rows, limits, strict=True)]

    def _draft(self, request: Request, limit: int) -> Draft:
        done = request.output_ids
        future = next(
            (
                tokens[len(done) :]
                for prompt, tokens in self._futures
                if prompt == request.prompt_ids and tokens[: len(done)] == done
            ),
            [],
        )
        guess = [*future, *self._random.choices(range(3, 500), k=limit)][: self._random.randint(0, limit)]
        wrong = [token if self._random.random() < self._accuracy else 7 + token % 100 for token in guess]
        return Draft(wrong, [0.5] * len(wrong))


class _TakeAll(DraftLengths):
    def choose(self, _requests: Sequence[Request], drafts: Sequence[Draft], _num_tokens: int) -> list[int]:
        return [len(draft.token_ids) for draft in drafts]


@pytest.fixture(params=[1.0, 0.7])
def drafting(request: pytest.FixtureRequest, model: Path, expected: list[RequestOutput]) -> Iterator[LLM]:
    with LLM(model, speculate="ngram", draft_tokens=7, **_OPTIONS) as llm:
        speculator = llm.parts.runtime.runner.speculator
        assert speculator is not None
        speculator.drafter = _Oracle(expected, request.param)
        speculator.lengths = _TakeAll()
        yield llm


def test_drafts_of_any_quality_change_nothing(drafting: LLM, expected: list[RequestOutput]) -> None:
    outputs = drafting.generate([text for text, _ in _REQUESTS], [params for _, params in _REQUESTS])
    assert summary(outputs) == summary(expected)
    for output, other in zip(outputs, expected, strict=True):
        assert (output.prompt_logprobs is None) == (other.prompt_logprobs is None)
    scheduler = drafting.parts.core.scheduler
    assert scheduler.stats.num_drafted > 30
    drafting.parts.core.scheduler.kv.check()
    # Again, now with a prefix cache that only accepted tokens may have entered.
    assert summary(drafting.generate(_STORY, _REQUESTS[0][1])) == summary(expected[:1])


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_lookup_drafters_change_nothing(model: Path, expected: list[RequestOutput], drafter: str) -> None:
    with LLM(model, speculate=drafter, **_OPTIONS) as llm:
        for _ in range(2):  # the second time, the first ones' texts are followed
            outputs = llm.generate([text for text, _ in _REQUESTS], [params for _, params in _REQUESTS])
            assert summary(outputs) == summary(expected)
        assert llm.stats.num_accepted > 0


def test_preemption_with_drafts(model: Path) -> None:
    prompts = [_STORY[begin : begin + 40] for begin in range(0, 60, 10)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    options = _OPTIONS | {"page_size": 1}
    with LLM(model, **options) as llm:
        plain = [llm.generate(prompt, params)[0] for prompt in prompts]
        budget, pages = llm.parts.runtime.budget, llm.parts.runtime.layout.peak_pages(_OPTIONS["context"])
    with LLM(model, speculate="ngram", memory=pages * budget.page_bytes, **options) as llm:
        speculator = llm.parts.runtime.runner.speculator
        assert speculator is not None
        speculator.drafter, speculator.lengths = _Oracle(plain, 0.8), _TakeAll()
        assert summary(llm.generate(prompts, params)) == summary(plain)
        assert llm.stats.num_preemptions > 0
        assert llm.stats.num_accepted > 0


@pytest.mark.usefixtures("same_bits")
def test_the_recorded_executor_gives_the_same_bits(model_path: Callable[[str], Path]) -> None:
    """On a quantized model, whose rounding of activations makes another token of the smallest difference: alone, in a
    batch, and checked among drafts of any quality."""
    options: dict[str, Any] = {"context": 192, "threads": 2, "prefix_caching": False, "concurrency": 3}
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
    prompts = [_STORY, _STORY[20:90], "def add(a, b):\n    return a + b\n\ndef add(a, b):\n"]
    with LLM(model_path("smollm2"), **options) as llm:
        if llm.parts.runtime.executor.name != "recorded":
            pytest.skip("the C++ kernels are not built")
        plain = [llm.generate(prompt, params)[0] for prompt in prompts]
        together = llm.generate(prompts, params)
    with LLM(model_path("smollm2"), speculate="ngram", draft_tokens=7, **options) as llm:
        speculator = llm.parts.runtime.runner.speculator
        assert speculator is not None
        speculator.drafter, speculator.lengths = _Oracle(plain, 0.7), _TakeAll()
        drafted = [llm.generate(prompt, params)[0] for prompt in prompts]
        assert llm.stats.num_accepted > 20
    for one, other, third in zip(plain, together, drafted, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids == third.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs == third.outputs[0].logprobs


def test_where_no_draft_holds_tokens_come_in_runs(
    model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline only: whoever steps for single tokens gets single tokens."""
    options: dict[str, Any] = {"context": 96, "threads": 1, "concurrency": 2}
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with LLM(model_path("stories15m"), **options) as llm:
        plain = llm.generate(_STORY[:50], params)[0].outputs[0].token_ids
    with LLM(model_path("stories15m"), speculate="ngram", **options) as llm:
        runtime, core = llm.parts.runtime, llm.parts.core
        assert runtime.runner.speculator is not None
        monkeypatch.setattr(runtime.runner.speculator.drafter, "draft", lambda rows, _limits: [Draft() for _ in rows])
        runs: list[int] = []
        step = runtime.executor.step
        monkeypatch.setattr(runtime.executor, "step", lambda work: runs.append(work.max_run) or step(work))
        assert llm.generate(_STORY[:50], params)[0].outputs[0].token_ids == plain
        assert max(runs) == 4
        assert sum(n for n in runs if n > 1) > 35  # of 60
        costs = runtime.runner.speculator.lengths.costs
        runs.clear()
        core.add(llm.parts.intake.request(_STORY[:50], params, "single"))
        while core.has_work:
            assert all(len(event.token_ids) == 1 for event in core.step())
        assert not any(n > 1 for n in runs)
        assert costs.is_known(1)
