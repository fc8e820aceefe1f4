"""Structural tags: text is free until a trigger, then a tag of that trigger must follow."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tokenmill.errors import UserError
from tokenmill.grammar.source import check_limits, grammar_text
from tokenmill.types import StructuredSpec

_X = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
_Y = {"type": "array", "items": {"type": "boolean"}}
_TAGS = [
    {"begin": "<f=foo>", "schema": _X, "end": "</f>"},
    {"begin": "<f=bar>", "schema": _Y, "end": "</f>"},
    {"begin": "[call ", "schema": _X, "end": "]"},
]
_LEGACY = {"structures": _TAGS, "triggers": ["<f=", "[call "]}


def _newer(**options: Any) -> dict[str, Any]:
    tags = [
        {"begin": tag["begin"], "content": {"type": "json_schema", "json_schema": tag["schema"]}, "end": tag["end"]}
        for tag in _TAGS
    ]
    return {"format": {"type": "triggered_tags", "triggers": _LEGACY["triggers"], "tags": tags, **options}}


def _accepts(value: Any, text: str) -> bool:
    spec = StructuredSpec("structural_tag", json.dumps(value))
    check_limits(spec)
    matcher = LLMatcher(LLTokenizer("byte"), grammar_text(spec), log_level=0)
    assert not matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize("value", [_LEGACY, _newer()], ids=["structures", "format"])
def test_text_is_free_until_a_trigger(value: Any) -> None:
    for text in (
        "",
        "Hello,\nworld <f> [1]",
        'Wait. <f=foo>{"x": 1}</f>',
        'A <f=bar>[true]</f> and <f=foo>{"x": 2}</f>\nthen [call {"x": 3}] done',
    ):
        assert _accepts(value, text), text
    for text in ("<f=baz>", "<f=foo>hello</f>", '<f=foo>{"y": 1}</f>', '<f=bar>{"x": 1}</f>', '[call {"x": 1}'):
        assert not _accepts(value, text), text


def test_how_many_tags() -> None:
    one = 'So: <f=foo>{"x": 1}</f>'
    assert not _accepts(_newer(at_least_one=True), "Hello")
    assert _accepts(_newer(at_least_one=True), one + " ok")
    assert not _accepts(_newer(stop_after_first=True), one + " ok")
    assert _accepts(_newer(stop_after_first=True), one)
    assert _accepts(_newer(stop_after_first=True), "Hello")
    assert not _accepts(_newer(stop_after_first=True, at_least_one=True), "Hello")


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        {"structures": [], "triggers": ["<"]},
        {"structures": _TAGS},
        {"structures": _TAGS, "triggers": ["<f="]},  # of the third tag there is none
        {"structures": _TAGS, "triggers": [""]},
        {"structures": [{"begin": "<", "schema": 1}], "triggers": ["<"]},
        {"structures": [{"begin": "<", "schema": {"minimum": -(2**63)}, "end": ""}], "triggers": ["<"]},
        {"format": {"type": "any_text"}},
        {
            "format": {
                "type": "triggered_tags",
                "triggers": ["<"],
                "tags": [{"begin": "<", "content": {"type": "regex"}}],
            }
        },
    ],
    ids=str,
)
def test_what_is_no_structural_tag_is_refused(value: Any) -> None:
    with pytest.raises(UserError) as caught:
        grammar_text(StructuredSpec("structural_tag", json.dumps(value)))
    assert caught.value.remedy
