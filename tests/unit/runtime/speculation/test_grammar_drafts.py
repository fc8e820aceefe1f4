"""Jump-forward: under a grammar the same tokens, log-probabilities and ends come in fewer steps.

The real engine with a small model and real grammars; drafts are taken whole, so that nothing depends on measured times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.runtime.speculation.outputs import summary
from tokenmill import LLM, SamplingParams
from tokenmill.engine.outputs import RequestOutput
from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation.gate import DraftGate
from tokenmill.runtime.speculation.length import DraftLengths
from tokenmill.types import Request, StructuredSpec

_OPTIONS: dict[str, Any] = {"context": 256, "page_size": 4, "kernels": "ref", "executor": "eager", "threads": 1}
_STORY = "Once upon a time, there was a little girl named Lily. She had a red ball."
_PERSON = StructuredSpec(
    "json_schema",
    '{"type":"object","properties":{"name":{"enum":["Lily","Tim","Benjamin"]},"description":{"type":"string",'
    '"maxLength":12},"favourite_toys":{"type":"array","items":{"enum":["ball","car"]},"maxItems":3},"age":'
    '{"type":"integer","minimum":1,"maximum":99}},"required":["name","description","favourite_toys","age"],'
    '"additionalProperties":false}',
)
_CHOICE = StructuredSpec("choice", choices=("an unnecessarily long answer", "an unnecessarily short answer", "no"))
_REGEX = StructuredSpec("regex", r"The answer is [0-9]{2}, which is (odd|even)\.")

_REQUESTS: list[tuple[str, SamplingParams]] = [
    (_STORY, SamplingParams(temperature=0.0, max_tokens=60, structured=_PERSON)),
    (_STORY, SamplingParams(temperature=1.1, seed=3, max_tokens=80, structured=_PERSON, n=2)),
    (_STORY, SamplingParams(temperature=0.0, max_tokens=60, structured=_PERSON, logprobs=2)),
    (_STORY[:40], SamplingParams(temperature=0.9, top_p=0.9, seed=8, max_tokens=40, structured=_CHOICE, logprobs=0)),
    (_STORY, SamplingParams(temperature=0.0, max_tokens=40, structured=_REGEX, repetition_penalty=1.3)),
    (_STORY, SamplingParams(temperature=0.0, max_tokens=60, structured=_PERSON, stop=("favourite",))),
    (_STORY, SamplingParams(temperature=0.0, max_tokens=7, structured=_PERSON)),  # ends inside a draft
    (_STORY, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)),  # free, in the same batch
    (_STORY, SamplingParams(temperature=0.8, seed=4, max_tokens=20)),
]


class _TakeAll(DraftLengths):
    def choose(self, _requests: Sequence[Request], drafts: Sequence[Draft], _num_tokens: int) -> list[int]:
        return [len(draft.token_ids) for draft in drafts]


class _Open(DraftGate):
    def lets_through(self, _num_rows: int) -> bool:
        return True


def _generate(llm: LLM) -> list[RequestOutput]:
    return llm.generate([text for text, _ in _REQUESTS], [params for _, params in _REQUESTS])


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], Path]) -> Path:
    return model_path("stories15m")


@pytest.fixture(scope="module")
def without(model: Path) -> tuple[list[RequestOutput], int]:
    with LLM(model, jump_forward=False, **_OPTIONS) as llm:
        assert llm.parts.runtime.runner.speculator is None
        outputs = _generate(llm)
        return outputs, llm.stats.num_steps


@pytest.fixture(params=["off", "ngram"])
def jumping(request: pytest.FixtureRequest, model: Path) -> Iterator[LLM]:
    with LLM(model, speculate=request.param, **_OPTIONS) as llm:
        speculator = llm.parts.runtime.runner.speculator
        assert speculator is not None
        speculator.lengths = _TakeAll()
        speculator._grammar_gate = _Open("grammar")
        yield llm


def test_the_output_is_the_same_in_fewer_steps(jumping: LLM, without: tuple[list[RequestOutput], int]) -> None:
    outputs, num_steps = without
    for _ in range(3):
        before = jumping.stats.num_steps
        assert summary(_generate(jumping)) == summary(outputs)
        steps = jumping.stats.num_steps - before
        jumping.parts.kv.check()
    assert steps <= 0.7 * num_steps
    assert jumping.stats.num_accepted > 0


def test_preempted_requests_go_on_where_they_were(model: Path, without: tuple[list[RequestOutput], int]) -> None:
    """Pages for two of the requests at a time."""
    with LLM(model, memory=260 * 6 * 6 * 48 * 2 * 4, **_OPTIONS) as llm:
        assert llm.parts.runtime.runner.speculator is not None
        llm.parts.runtime.runner.speculator.lengths = _TakeAll()
        assert summary(_generate(llm)) == summary(without[0])


def test_free_requests_are_not_drafted_for(model: Path) -> None:
    with LLM(model, **_OPTIONS) as llm:
        llm.generate([_STORY] * 2, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        assert llm.stats.num_drafts == 0


def test_auto_gives_the_same_output(model: Path, without: tuple[list[RequestOutput], int]) -> None:
    with LLM(model, speculate="auto", **_OPTIONS) as llm:
        speculator = llm.parts.runtime.runner.speculator
        assert speculator is not None
        assert speculator.gate is not None
        for _ in range(3):
            assert summary(_generate(llm)) == summary(without[0])
        assert all(each.reason for each in llm.stats.drafting)
