"""Generated text: what greedy answers of a candidate do that those of the baseline do not, and perplexity hides.

Repetition, answers that never end, answers cut short, another script, and JSON that no longer parses. Each figure is
the mean over the same prompts. How far it may be from the baseline's is derived from a control: the baseline itself
with another plain KV dtype, a change that everyone accepts and that still lets greedy texts part ways.
Pure functions on answers, except `write_answers`, which asks an engine. Called by quality.py.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tokenmill.checkpoint.chat_template import ChatTemplate
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.engine.llm import LLM
from tokenmill.evaluate.statistics import mean
from tokenmill.optimize.results import Check
from tokenmill.types import SamplingParams

_NGRAM = 4
_PROMPT_TOKENS = 48
_JSON_TOKENS = 64
_CUT = 0.25  # an answer of less than this share of the baseline's tokens is cut short
_MIN_JSON = 3  # of the prompts, that the baseline must answer with valid JSON
_CONTROL_ERRORS = 2.0  # standard errors that are added to the control's own drift
_ONE_SIDED_95 = 1.645
# Rises that nobody would notice, whatever the control does: two in a hundred 4-grams more are no loop.
_MIN_RISE = {"repetition": 0.1, "unfinished answers": 0.15, "cut answers": 0.15, "script": 0.1, "invalid JSON": 0.2}
_CONTINUE = "Continue this text in the same language and style:\n\n{}"
_JSON_SUBJECTS = ("a cat", "the city of Rome", "a red car", "the number seven", "a cup of tea", "a book about trees")
_JSON_ASKED = 'Describe {} as a JSON object with the fields "name", "kind" and "tags". Answer with the JSON only.'
_JSON_SHOTS = (
    'Subject: a dog\nJSON: {"name": "dog", "kind": "animal", "tags": ["pet", "four legs"]}\n\n'
    'Subject: the planet Mars\nJSON: {"name": "Mars", "kind": "planet", "tags": ["red", "cold"]}\n\nSubject: '
)


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: list[int]
    text: str
    ended: bool  # by an end-of-text token, not by the limit


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids, so that every engine gets exactly the same."""

    continuations: list[list[int]]
    json_objects: list[list[int]]
    max_tokens: int

    @property
    def context(self) -> int:
        longest = max((len(ids) for ids in self.continuations), default=0) + self.max_tokens
        return max(longest, max((len(ids) for ids in self.json_objects), default=0) + _JSON_TOKENS)


@dataclass(frozen=True, slots=True)
class Answers:
    continuations: list[Answer]
    json_objects: list[Answer]


def cut_prompts(
    text: str, tokenizer: Tokenizer, template: ChatTemplate | None, count: int, max_tokens: int, context: int
) -> Prompts:
    """Passages from evenly spaced places of the text; a model with a chat template is asked to continue them, so that
    its answers have an end."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    length = max(1, min(_PROMPT_TOKENS, context // 4, len(tokens)))
    step = max(1, (len(tokens) - length) // max(1, count))
    starts = list(dict.fromkeys(min(number * step, len(tokens) - length) for number in range(count)))
    passages = [tokenizer.decode(tokens[begin : begin + length]) for begin in starts]
    prompts = [_ask(tokenizer, template, _CONTINUE.format(each) if template else each) for each in passages]
    longest = max(map(len, prompts))
    objects = [
        _ask(tokenizer, template, _JSON_ASKED.format(each) if template else f"{_JSON_SHOTS}{each}\nJSON:")
        for each in _JSON_SUBJECTS
    ]
    return Prompts(
        [ids for ids in prompts if len(ids) < context],
        [ids for ids in objects if len(ids) + _JSON_TOKENS <= context],
        max(1, min(max_tokens, context - longest)),
    )


def _ask(tokenizer: Tokenizer, template: ChatTemplate | None, text: str) -> list[int]:
    if template is None:
        return tokenizer.encode(text)
    rendered = template.render([{"role": "user", "content": text}])
    return tokenizer.encode(rendered, add_special_tokens=False, parse_special=True)


def write_answers(llm: LLM, prompts: Prompts) -> Answers:
    return Answers(
        _write(llm, prompts.continuations, prompts.max_tokens), _write(llm, prompts.json_objects, _JSON_TOKENS)
    )


def _write(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    if not prompts:
        return []
    outputs = llm.generate(prompts, SamplingParams(max_tokens=max_tokens, temperature=0.0))
    answers = [output.outputs[0] for output in outputs]
    return [Answer(list(each.token_ids), each.text, each.finish_reason == "stop") for each in answers]


def generation_checks(candidate: Answers, baseline: Answers, control: Answers) -> list[Check]:
    checks = [
        _continuations("repetition", lambda each, _: repetition(each.token_ids), candidate, baseline, control),
        _script_check(candidate, baseline, control),
        _continuations("cut answers", _is_cut, candidate, baseline, control),
    ]
    ended = sum(each.ended for each in baseline.continuations)
    if ended:
        checks.append(_continuations("unfinished answers", _is_unfinished, candidate, baseline, control))
    else:
        note = f"skipped: none of the baseline's {len(baseline.continuations)} answers ends within the limit"
        checks.append(Check("unfinished answers", 0.0, 0.0, 0.0, note=note))
    return [*checks, _json_check(candidate, baseline, control)]


def repetition(token_ids: Sequence[int]) -> float:
    """Share of the n-grams that occurred before in the same answer: near one in a loop."""
    grams = [tuple(token_ids[begin : begin + _NGRAM]) for begin in range(len(token_ids) - _NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def script_shares(text: str) -> dict[str, float]:
    """Share of the characters in each script, and of digits, space, punctuation and what is none of these."""
    classes = Counter(map(_character_class, text))
    return {name: number / len(text) for name, number in classes.items()}


def script_distance(first: str, second: str) -> float:
    """Half the sum of the differences of shares: 0 for the same mixture, 1 for nothing in common."""
    a, b = script_shares(first), script_shares(second)
    return sum(abs(a.get(name, 0.0) - b.get(name, 0.0)) for name in a.keys() | b.keys()) / 2


def holds_json(text: str) -> bool:
    """Whether the first brace of an answer begins a complete JSON object."""
    begin = text.find("{")
    if begin < 0:
        return False
    try:
        value, _ = json.JSONDecoder().raw_decode(text[begin:])
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)


def _character_class(character: str) -> str:
    category = unicodedata.category(character)
    if category[0] == "L":
        return unicodedata.name(character, "LETTER").split(" ", 1)[0]
    return {"N": "digit", "Z": "space", "P": "punctuation", "M": "mark"}.get(
        category[0], "space" if character in "\n\t\r" else "other"
    )


def _is_cut(answer: Answer, baseline: Answer) -> float:
    return float(answer.ended and len(answer.token_ids) < _CUT * len(baseline.token_ids))


def _is_unfinished(answer: Answer, _baseline: Answer) -> float:
    return float(not answer.ended)


def _continuations(
    name: str, figure: Callable[[Answer, Answer], float], candidate: Answers, baseline: Answers, control: Answers
) -> Check:
    def figures(answers: Answers) -> np.ndarray:
        pairs = zip(answers.continuations, baseline.continuations, strict=True)
        return np.array([figure(each, base) for each, base in pairs])

    return _check(name, figures(candidate), figures(baseline), figures(control))


def _script_check(candidate: Answers, baseline: Answers, control: Answers) -> Check:
    """A distance from the baseline's text: what it is compared with is the control's distance."""

    def distances(answers: Answers) -> np.ndarray:
        pairs = zip(answers.continuations, baseline.continuations, strict=True)
        return np.array([script_distance(each.text, base.text) for each, base in pairs])

    own = distances(control)
    return _check("script", distances(candidate), own, own)


def _json_check(candidate: Answers, baseline: Answers, control: Answers) -> Check:
    name = "invalid JSON"
    triples = list(zip(candidate.json_objects, baseline.json_objects, control.json_objects, strict=True))
    managed = [each for each, base, other in triples if holds_json(base.text) and holds_json(other.text)]
    if len(managed) < _MIN_JSON:
        note = f"skipped: the baseline answers {len(managed)} of {len(triples)} prompts with valid JSON"
        return Check(name, 0.0, 0.0, 0.0, note=note)
    invalid = np.array([float(not holds_json(each.text)) for each in managed])
    return _check(name, invalid, np.zeros_like(invalid), np.zeros_like(invalid))


def _check(name: str, candidate: np.ndarray, baseline: np.ndarray, control: np.ndarray) -> Check:
    """Refused where a rise over the baseline is shown, by prompt, to exceed what the control's could be."""
    drift = mean(control - baseline)
    variation = abs(drift.value) + _CONTROL_ERRORS * drift.stderr
    allowed = max(_MIN_RISE[name], variation) + _ONE_SIDED_95 * mean(candidate - baseline).stderr
    value, reference = float(candidate.mean()), float(baseline.mean())
    limit = min(1.0, reference + allowed)
    words = f"{name} of generated text: {value:.0%} against {reference:.0%} of the baseline, more than {limit:.0%}"
    return Check(name, value, reference, limit, words if value > limit else "")
