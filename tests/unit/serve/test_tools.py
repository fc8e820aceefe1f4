"""Tool calls in text: every style, in any pieces; what is no call is content; forced calls are read back unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tokenmill.errors import UserError
from tokenmill.grammar.schemas import json_rule
from tokenmill.serve.tools import TOOL_PARSERS
from tokenmill.serve.tools.base import Answer, CallArguments, CallStart, ToolEvent, ToolParser, fold
from tokenmill.serve.tools.functions import Function, read_functions

_OFFERED = [Function("get_weather", {"type": "object"}), Function("now", {"type": "object"})]
_WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris", "note": "a } \\" </tool_call> {"}}'
_SWAPPED = '{"arguments": {"city": "Rome"}, "name": "get_weather"}'
_PARIS = ("get_weather", {"city": "Paris", "note": 'a } " </tool_call> {'})

# (style, text, content, calls)
_CASES: list[tuple[str, str, str, list[Any]]] = [
    ("hermes", f"<tool_call>\n{_WEATHER}\n</tool_call>", "", [_PARIS]),
    ("hermes", f"Let me see.\n<tool_call>{_WEATHER}</tool_call>", "Let me see.", [_PARIS]),
    ("hermes", f"<tool_call>{_SWAPPED}</tool_call>", "", [("get_weather", {"city": "Rome"})]),
    ("hermes", f'<tool_call>{_WEATHER}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>', "",
     [_PARIS, ("now", {})]),
    ("hermes", f"<tool_call>{_WEATHER}</tool_call> and so on", " and so on", [_PARIS]),
    ("hermes", f"<tool_call>{_WEATHER}", "", [_PARIS]),
    ("hermes", f"<tool_call>{_WEATHER}</tool_", "", [_PARIS]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("now", {"a": 1})]),
    ("hermes", "<tool_call>not json</tool_call> x", "<tool_call>not json</tool_call> x", []),
    ("hermes", '<tool_call>{"name": "now", </tool_call>', '<tool_call>{"name": "now", </tool_call>', []),
    ("hermes", '<tool_call>{"name": "now",}</tool_call>', '<tool_call>{"name": "now",}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}', '<tool_call>{"name": "now", "arguments": [1]}', []),
    ("hermes", f"<tool_call>{{oops}} <tool_call>{_WEATHER}</tool_call>", "<tool_call>{oops}", [_PARIS]),
    ("hermes", "a < b <tool> \n", "a < b <tool> \n", []),
    ("hermes", "<tool_call>" * 3, "<tool_call>" * 3, []),
    ("hermes", "", "", []),
    ("llama3_json", _WEATHER.replace("arguments", "parameters"), "", [_PARIS]),
    ("llama3_json", f"\n<|python_tag|>{_WEATHER}", "", [_PARIS]),
    ("llama3_json", f'{_WEATHER}; {{"name": "now", "parameters": {{}}}}\n', "", [_PARIS, ("now", {})]),
    ("llama3_json", f'{{"type": "function", "function": {_SWAPPED}}}', "", [("get_weather", {"city": "Rome"})]),
    ("llama3_json", f"{_WEATHER}; done", "; done", [_PARIS]),
    ("llama3_json", f"Sure: {_WEATHER}", f"Sure: {_WEATHER}", []),
    ("llama3_json", '{"answer": 42} ', '{"answer": 42} ', []),
    ("llama3_json", '{"name": "now", "parameters": {', '{"name": "now", "parameters": {', []),
    ("llama3_json", "<|python", "<|python", []),
    ("pythonic", '[get_weather(city="Paris", days=-2, deep={"a": [None, True, false]}), now()]', "",
     [("get_weather", {"city": "Paris", "days": -2, "deep": {"a": [None, True, False]}}), ("now", {})]),
    ("pythonic", " [now()]\n", "", [("now", {})]),
    ("pythonic", "[get_weather(city='it\\'s ] (')] ok", " ok", [("get_weather", {"city": "it's ] ("})]),
    ("pythonic", "[now(1)]", "[now(1)]", []),
    ("pythonic", "[now(x=__import__('os'))]", "[now(x=__import__('os'))]", []),
    ("pythonic", "[rm()]", "[rm()]", []),
    ("pythonic", "[1, 2] and", "[1, 2] and", []),
    ("pythonic", "[now(", "[now(", []),
    ("pythonic", "[" + "(" * 5000, "[" + "(" * 5000, []),
    ("pythonic", "Hello [now()]", "Hello [now()]", []),
]  # fmt: skip


def _parser(style: str, **options: Any) -> ToolParser:
    parser: ToolParser = TOOL_PARSERS.get(style)(_OFFERED, **options)
    return parser


def _events(parser: ToolParser, pieces: list[str]) -> list[ToolEvent]:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def _plain(answer: Answer) -> tuple[str, list[tuple[str, str]]]:
    return answer.content, [(call.name, call.arguments) for call in answer.calls]


@pytest.mark.parametrize(("style", "text", "content", "calls"), _CASES)
def test_what_a_text_means(style: str, text: str, content: str, calls: list[Any]) -> None:
    answer = fold(_events(_parser(style), [text]))
    assert answer.content == content
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
    assert len({call.call_id for call in answer.calls}) == len(calls)


@pytest.mark.parametrize(("style", "text", "content", "calls"), _CASES)
def test_one_character_at_a_time_means_the_same(style: str, text: str, content: str, calls: list[Any]) -> None:
    answer = fold(_events(_parser(style), list(text)))
    assert (answer.content, len(answer.calls)) == (content, len(calls))
    assert _plain(answer) == _plain(fold(_events(_parser(style), [text])))


_FRAGMENTS = st.sampled_from([
    "<tool_call>", "</tool_call>", "<tool", _WEATHER, _SWAPPED, '{"name": "now"}', "{", "}", '"', "\\", "; ", " ", "\n",
    "[TOOL_CALLS]", "[ARGS]", "now", "functools", "```", "json", "<|tool_call|>", "<function=now>", "</function>",
    "<parameter=a>", "</parameter>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<|python_start|>", "<|python_tag|>", "[now()", "]", "[get_weather(city='x')]", "'", "(", ")", "Hello", "é", ", ",
    '"name": "now"',
])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(style=st.sampled_from(TOOL_PARSERS.names()), fragments=st.lists(_FRAGMENTS, max_size=12), data=st.data(),
       certain=st.booleans(), parallel=st.booleans())  # fmt: skip
def test_any_pieces_give_the_same_answer(
    style: str, fragments: list[str], data: st.DataObject, certain: bool, parallel: bool
) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = fold(_events(_parser(style, certain=certain, parallel=parallel), [text]))
    assert _plain(fold(_events(_parser(style, certain=certain, parallel=parallel), pieces))) == _plain(whole)
    if not whole.calls:
        assert whole.content == text
    if not parallel:
        assert len(whole.calls) <= 1


def test_content_is_not_held_back_longer_than_needed() -> None:
    parser = _parser("hermes")
    assert fold(parser.feed("Hello wor")).content == "Hello wor"
    assert fold(parser.feed("ld <to")).content == "ld"
    assert fold(parser.feed("day> x")).content == " <today> x"


def test_arguments_of_a_forced_call_come_as_they_are_written() -> None:
    parser = _parser("hermes", certain=True)
    begin = parser.feed('<tool_call>\n{"name": "get_weather", "arguments": {"ci')
    assert isinstance(begin[0], CallStart)
    assert begin[1:] == [CallArguments(0, '{"ci')]
    assert parser.feed('ty": "}') == [CallArguments(0, 'ty": "}')]
    rest = [*parser.feed('"}}\n</tool_call>'), *parser.finish()]
    assert fold([*begin, CallArguments(0, 'ty": "}'), *rest]).calls[0].arguments == '{"city": "}"}'


def test_a_forced_call_cut_by_length_keeps_what_came() -> None:
    answer = fold(_events(_parser("llama3_json", certain=True), ['{"name": "now", "parameters": {"a": [1, ']))
    assert _plain(answer) == ("", [("now", '{"a": [1, ')])


_FUNCTIONS = [
    Function(
        "get_weather",
        {
            "type": "object",
            "properties": {"unit": {"$ref": "#/$defs/unit"}, "city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"unit": {"enum": ["c", "f"]}},
        },
    ),
    Function("now", {"type": "object", "properties": {"utc": {"type": "boolean"}}, "additionalProperties": False}),
]
_ARRAY = '[{"name": "get_weather", "arguments": {"unit": "c", "city": "Paris\\n"}}, {"name": "now", "arguments": {}}]'
_FORCED = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"unit": "c", "city": "Paris\\n"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "get_weather", "parameters": {"unit": "c", "city": "Paris\\n"}}; '
    '{"name": "now", "parameters": {}}',
    "pythonic": '[get_weather(city="Paris\\n", unit="c"), now()]',
    "llama4_pythonic": '[get_weather(city="Paris\\n", unit="c"), now()]',
    "llama4_json": '{"name": "get_weather", "parameters": {"unit": "c", "city": "Paris\\n"}}; '
    '{"name": "now", "parameters": {}}',
    "mistral": f"[TOOL_CALLS]{_ARRAY}",
    "granite": f"<|tool_call|>{_ARRAY}",
    "phi4_mini": f"functools{_ARRAY}",
    "xlam": _ARRAY,
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"unit": "c", "city": "Paris\\n"}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"unit": "c", "city": "Paris\\n"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"unit": "c", "city": "Paris\\n"}<|call|>'
    "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n\n</parameter>\n"
    '<parameter=unit>\n"c"\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("style", TOOL_PARSERS.names())
@pytest.mark.parametrize("certain", [True, False])
def test_the_grammar_of_a_style_is_what_its_parser_reads(style: str, certain: bool) -> None:
    rules = TOOL_PARSERS.get(style).grammar(_FUNCTIONS, True)
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(f"start: calls\n{rules}"), log_level=0)
    assert not matcher.get_error()
    data = list(_FORCED[style].encode())
    assert matcher.try_consume_tokens(data) == len(data)
    assert matcher.is_accepting()
    answer = fold(_events(_parser(style, certain=certain), [_FORCED[style]]))
    assert answer.content == ""
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [
        ("get_weather", {"city": "Paris\n", "unit": "c"}),
        ("now", {}),
    ]


@pytest.mark.parametrize("style", TOOL_PARSERS.names())
@pytest.mark.parametrize("wrong", ["now", "other", "celsius"])
def test_the_grammar_of_a_style_forbids_other_calls(style: str, wrong: str) -> None:
    rules = TOOL_PARSERS.get(style).grammar(_FUNCTIONS[:1], False)
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(f"start: calls\n{rules}"), log_level=0)
    text = _FORCED[style].replace("get_weather", wrong) if wrong != "celsius" else _FORCED[style].replace('"c"', '"k"')
    data = list(text.encode())
    assert matcher.try_consume_tokens(data) < len(data)


@pytest.mark.parametrize("style", TOOL_PARSERS.names())
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_and_json_may_stand_for_each_other(style: str, parallel: bool) -> None:
    """Whatever the calls of a style begin with: JSON of the format is as possible as a call."""
    schema = {"anyOf": [{"type": "object"}, {"type": "array"}]}
    rules = TOOL_PARSERS.get(style).grammar_beside_json(_FUNCTIONS, parallel)
    lark = LLMatcher.grammar_from_lark(f"start: answer | calls\nanswer: {json_rule(schema)}\n{rules}")

    def accepted(text: str) -> bool:
        matcher = LLMatcher(LLTokenizer("byte"), lark, log_level=0)
        assert not matcher.get_error()
        data = list(text.encode())
        return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()

    for text in ('{"a": 1}', '{"name": "x"}', "{}", '[{"a": 1}]', '[{"name": 1}]', "[false, null]", '["get"]', "[]"):
        assert accepted(text), text
    assert accepted(_FORCED[style]) or not parallel


@pytest.mark.parametrize("style", ["llama3_json", "llama4_json", "xlam"])
def test_calls_made_of_json_still_follow_their_schemas(style: str) -> None:
    rules = TOOL_PARSERS.get(style).grammar_beside_json(_FUNCTIONS, True)
    lark = LLMatcher.grammar_from_lark(f"start: answer | calls\nanswer: {json_rule({'type': 'integer'})}\n{rules}")
    for text, good in ((_FORCED[style], True), (_FORCED[style].replace('"c"', '"k"'), False), ("17", True)):
        matcher = LLMatcher(LLTokenizer("byte"), lark, log_level=0)
        data = list(text.encode())
        assert (matcher.try_consume_tokens(data) == len(data)) is good


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "retrieval"},
        {"type": "function"},
        {"type": "function", "function": {"name": ""}},
        {"type": "function", "function": {"name": 'a"b'}},
        {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}},
        {"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}},
        {"type": "function", "function": {"name": "f", "parameters": {"required": [[]]}}},
    ],
)
def test_tools_that_are_none_are_refused(tool: Any) -> None:
    with pytest.raises(UserError):
        read_functions([tool])
