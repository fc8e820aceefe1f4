"""Checks of generated text: each refuses a model with that very fault, none refuses another sound text."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from tokenmill.optimize.generation import (
    Answer,
    Answers,
    generation_checks,
    holds_json,
    repetition,
    script_distance,
    script_shares,
)
from tokenmill.optimize.results import Check

_TEXT = "the little dog ran to a big tree and saw one red bird that sang in warm sun all day with her friend"
_WORDS = _TEXT.split()
_OBJECT = '{"name": "cat", "tags": ["pet"]}'


def _answers(seed: int, change: Callable[[Answer], Answer] = lambda each: each, json: str = _OBJECT) -> Answers:
    """Twelve texts of random words; every second one ends before the limit."""
    random = Random(seed)
    made = []
    for number in range(12):
        words = [random.randrange(len(_WORDS)) for _ in range(30 if number % 2 else 48)]
        made.append(Answer(words, " ".join(_WORDS[word] for word in words) + ".", bool(number % 2)))
    return Answers([change(each) for each in made], [Answer([1], json, True)] * 6)


BASELINE, CONTROL = _answers(0), _answers(1)


def _checks(candidate: Answers) -> dict[str, Check]:
    return {check.name: check for check in generation_checks(candidate, BASELINE, CONTROL)}


def _refused(candidate: Answers) -> set[str]:
    return {name for name, check in _checks(candidate).items() if check.refusal}


@pytest.mark.parametrize("seed", range(2, 12))
def test_another_sound_model_passes(seed: int) -> None:
    assert _refused(_answers(seed)) == set()


def test_loops_are_refused() -> None:
    def loop(answer: Answer) -> Answer:
        ids = (answer.token_ids[:3] * 20)[: len(answer.token_ids)]
        return Answer(ids, " ".join(_WORDS[word] for word in ids), answer.ended)

    assert _refused(_answers(2, loop)) == {"repetition"}
    assert "repetition of generated text: 9" in _checks(_answers(2, loop))["repetition"].refusal


def test_answers_that_never_end_are_refused() -> None:
    assert _refused(_answers(2, lambda each: Answer(each.token_ids, each.text, False))) == {"unfinished answers"}


def test_answers_that_end_at_once_are_refused() -> None:
    assert "cut answers" in _refused(_answers(2, lambda each: Answer(each.token_ids[:2], each.text[:40], True)))


@pytest.mark.parametrize("letters", ["абвгдежз", "你好世界是的", "\ufffd\x00\x01", "}{;=<>()"])
def test_another_script_is_refused(letters: str) -> None:
    def switch(answer: Answer) -> Answer:
        text = "".join(letters[ord(each) % len(letters)] if each != " " else each for each in answer.text)
        return Answer(answer.token_ids, text, answer.ended)

    assert _refused(_answers(2, switch)) == {"script"}


def test_json_that_no_longer_parses_is_refused() -> None:
    assert _refused(_answers(2, json='{"name": "cat", "tags": ["pet"')) == {"invalid JSON"}


def test_what_the_baseline_cannot_do_is_skipped_and_says_so() -> None:
    wordy, endless = _answers(0, json="a cat"), _answers(0, lambda each: Answer(each.token_ids, each.text, False))
    (json,) = [each for each in generation_checks(wordy, wordy, wordy) if each.name == "invalid JSON"]
    assert json.note == "skipped: the baseline answers 0 of 6 prompts with valid JSON"
    (end,) = [each for each in generation_checks(endless, endless, endless) if each.name == "unfinished answers"]
    assert end.note.startswith("skipped: none of the baseline's 12 answers ends")


def test_a_baseline_that_varies_allows_more() -> None:
    """The control of this one repeats itself in half of its answers: the baseline's own variation."""

    def half(answer: Answer) -> Answer:
        return (
            Answer([answer.token_ids[0]] * len(answer.token_ids), answer.text, answer.ended) if answer.ended else answer
        )

    varied = _answers(1, half)
    (strict,) = [each for each in generation_checks(varied, BASELINE, CONTROL) if each.name == "repetition"]
    (wide,) = [each for each in generation_checks(varied, BASELINE, varied) if each.name == "repetition"]
    assert strict.refusal
    assert not wide.refusal
    assert wide.limit > strict.limit


def test_the_measures() -> None:
    assert repetition([1, 2, 3, 4, 5, 6, 7, 8]) == 0.0
    assert repetition([1] * 20) == pytest.approx(16 / 17)
    assert repetition([1, 2]) == 0.0
    assert script_shares("ab 1.") == {"LATIN": 0.4, "space": 0.2, "digit": 0.2, "punctuation": 0.2}
    assert script_distance("abc", "xyz") == 0.0
    assert script_distance("abc", "где") == 1.0
    assert script_distance("", "abc") == 0.5
    assert holds_json('Sure: {"a": {"b": 1}} and more')
    assert not holds_json('{"a": 1')
    assert not holds_json("[1]")
    assert not holds_json("{" * 100_000)
