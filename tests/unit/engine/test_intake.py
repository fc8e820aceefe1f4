"""Prompts become requests: the KV budget of those that name none, and what the engine cannot keep."""

from __future__ import annotations

import pytest

from tokenmill.checkpoint.number_tokenizer import missing_tokenizer
from tokenmill.engine.intake import Intake
from tokenmill.errors import UserError
from tokenmill.types import CacheControl, SamplingParams, StructuredSpec


class _NoTokenizer:
    reads_text = True

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        raise AssertionError((text, add_special_tokens, parse_special))


def _intake(**fields: object) -> Intake:
    return Intake(_NoTokenizer(), 100, [2], 64, 0, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "budget"),
    [
        (None, CacheControl(policy="h2o", budget=40)),
        (CacheControl(ttl=60), CacheControl(ttl=60, policy="h2o", budget=40)),
        (CacheControl(policy="full"), CacheControl(policy="full")),
        (CacheControl(policy="streaming_llm", budget=16), CacheControl(policy="streaming_llm", budget=16)),
    ],
    ids=str,
)
def test_a_request_that_names_no_budget_gets_the_default(own: CacheControl | None, budget: CacheControl) -> None:
    intake = _intake(budget=CacheControl(policy="h2o", budget=40))
    assert intake.request([1, 2], SamplingParams(cache=own)).params.cache == budget
    assert _intake().request([1, 2], SamplingParams(cache=own)).params.cache == own


def test_no_tokenizer_writes_no_structured_output() -> None:
    intake = Intake(missing_tokenizer("model", 100), 100, [2], 64, 0)
    assert intake.request([1, 2], SamplingParams()).prompt_ids == [1, 2]
    with pytest.raises(UserError, match="model has no tokenizer"):
        intake.request("text", SamplingParams())
    with pytest.raises(UserError, match="no tokenizer to write text with"):
        intake.request([1, 2], SamplingParams(structured=StructuredSpec("regex", "a+")))


def test_what_the_engine_cannot_keep_is_refused() -> None:
    def refuse(params: SamplingParams) -> None:
        if params.cache is not None:
            raise UserError("no", "never")

    intake = _intake(check=refuse)
    intake.request([1, 2], SamplingParams())
    with pytest.raises(UserError, match="no"):
        intake.request([1, 2], SamplingParams(cache=CacheControl(ttl=60)))


def test_prompts_that_begin_as_the_last_one_are_checked_all_the_same() -> None:
    intake = Intake(_NoTokenizer(), 100, [2], 4096, 0)
    start = [number % 90 for number in range(1500)]
    assert intake.request([*start, 7], SamplingParams()).prompt_ids == [*start, 7]
    for bad in (100, -1, True, 3.0):
        with pytest.raises(UserError):
            intake.request([*start, bad], SamplingParams())  # type: ignore[list-item]
        with pytest.raises(UserError):
            intake.request([bad, *start], SamplingParams())  # type: ignore[list-item]
    like_ints = [float(each) for each in start[:1024]]  # taken for what they are equal to
    got = intake.request([*like_ints, *start[1024:], 5], SamplingParams())  # type: ignore[list-item]
    assert got.prompt_ids == [*start, 5]
    assert set(map(type, got.prompt_ids)) == {int}
    shorter = intake.request(start[:600], SamplingParams())
    shorter.token_ids.append(1)
    assert intake.request(start[:700], SamplingParams()).prompt_ids == start[:700]


class _Letters:
    """A token for each character; a blank and its letter are one."""

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        assert not parse_special
        assert not add_special_tokens
        first = [50 + ord(text[1]) - ord("a")] if text.startswith(" ") else [ord(text[0]) - ord("a")]
        return first + [ord(letter) - ord("a") for letter in text[len(text) - len(text.lstrip()) + 1 :]]


def test_bad_words_become_tokens_with_and_without_a_blank() -> None:
    intake = Intake(_Letters(), 100, [2], 64, 0)
    params = intake.request([1], SamplingParams(bad_words=("ab", " c"))).params
    assert params.bad_word_ids == ((0, 1), (50, 1), (2,), (52,))
    assert intake.request([1], params).params == params
    with pytest.raises(UserError, match="bad_words"):
        SamplingParams(bad_words=(" ",))


def test_allowed_tokens_are_of_the_vocabulary() -> None:
    assert _intake().request([1], SamplingParams(allowed_token_ids=[7, 8])).params.allowed_token_ids == (7, 8)
    for ids in ([100], [-1], []):
        with pytest.raises(UserError, match="allowed_token_ids"):
            _intake().request([1], SamplingParams(allowed_token_ids=ids))
