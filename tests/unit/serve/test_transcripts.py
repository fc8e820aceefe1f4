"""Transcripts of each family's documented format: cut at any place, they mean the same as at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.serve.reasoning import REASONING_PARSERS
from tokenmill.serve.reasoning.base import Reasoning, ReasoningParser, Visible
from tokenmill.serve.tools import TOOL_PARSERS
from tokenmill.serve.tools.base import fold
from tokenmill.serve.tools.functions import Function

_FUNCTIONS = [
    Function(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "exact": {"type": "boolean"},
                "tags": {"type": "array"},
                "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        },
    ),
    Function("now", {"type": "object"}),
]
_PARIS = ("get_weather", {"city": "Paris"})
_NOW = ("now", {})
_BOTH = '[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]'

# (style, text, reasoning, content, calls)
_TOOLS: list[tuple[str, str, str, str, list[Any]]] = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n<tool_call>\n'
     '{"name": "now", "arguments": {}}\n</tool_call>', "", "", [_PARIS, _NOW]),
    ("mistral", f"[TOOL_CALLS]{_BOTH}", "", "", [_PARIS, _NOW]),
    ("mistral", f"[TOOL_CALLS] {_BOTH}", "", "", [_PARIS, _NOW]),
    ("mistral", 'Wait.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}', "", "Wait.",
     [_PARIS, _NOW]),
    ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}', "", "", [_PARIS]),
    ("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}', "", "", [_PARIS]),
    ("mistral", '[TOOL_CALLS]rm[ARGS]{"all": true}', "", '[TOOL_CALLS]rm[ARGS]{"all": true}', []),
    ("mistral", "[TOOL_CALLS]now " + "x" * 300, "", "[TOOL_CALLS]now " + "x" * 300, []),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"na', "", ', {"na', [_NOW]),
    ("granite", f"<|tool_call|>{_BOTH}", "", "", [_PARIS, _NOW]),
    ("granite", f"<tool_call>{_BOTH}", "", "", [_PARIS, _NOW]),
    ("granite", '<function_call> {"name": "now", "arguments": {}}\n<function_call> {"name": "now", "arguments": {}}',
     "", "", [_NOW, _NOW]),
    ("phi4_mini", f"functools{_BOTH}", "", "", [_PARIS, _NOW]),
    ("phi4_mini", f"<|tool_call|>{_BOTH}<|/tool_call|>", "", "", [_PARIS, _NOW]),
    ("phi4_mini", "Use functools [1] here", "", "Use functools [1] here", []),
    ("xlam", _BOTH, "", "", [_PARIS, _NOW]),
    ("xlam", f"```json\n{_BOTH}\n```", "", "", [_PARIS, _NOW]),
    ("xlam", f"Sure:\n```\n{_BOTH}\n```", "", "Sure:", [_PARIS, _NOW]),
    ("xlam", f"[TOOL_CALLS]{_BOTH}", "", "", [_PARIS, _NOW]),
    ("xlam", "[1, 2] is a list", "", "[1, 2] is a list", []),
    ("xlam", "```python\nx = [{}]\n```", "", "```python\nx = [{}]\n```", []),
    ("deepseek_v3", "On it.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
     '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", "On it.", [_PARIS, _NOW]),
    ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}'
     "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", "",
     [_PARIS, _NOW]),
    ("harmony", "<|channel|>analysis<|message|>Need to use a function.<|end|><|start|>assistant<|channel|>commentary "
     'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>', "Need to use a function.", "",
     [_PARIS]),
    ("harmony", "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant to=functions.now<|channel|>"
     "commentary <|constrain|>json<|message|>{}", "", "I will look.", [_NOW]),
    ("harmony", "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>2 < 3",
     "Easy.", "2 < 3", []),
    ("harmony", "No framing at all", "", "No framing at all", []),
    ("qwen3_coder", "Looking.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSaint\nDenis\n</parameter>\n"
     "<parameter=days>\n3\n</parameter>\n<parameter=exact>\ntrue\n</parameter>\n<parameter=tags>\n[1, \"a\"]\n"
     "</parameter>\n<parameter=zip>\nnull\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n"
     "</function>\n</tool_call>", "", "Looking.",
     [("get_weather", {"city": "Saint\nDenis", "days": 3, "exact": True, "tags": [1, "a"], "zip": None}), _NOW]),
    ("qwen3_coder", "<function=get_weather>\n<parameter=city>\n42\n</parameter>\n<parameter=exact>\nTrue\n"
     "</parameter>\n</function>", "", "", [("get_weather", {"city": "42", "exact": True})]),
    ("qwen3_coder", "<tool_call>\n<function=rm>\n</function>", "", "<tool_call>\n<function=rm>\n</function>", []),
    ("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', "", "", [_PARIS]),
    ("llama4_json", '<|python_start|>{"name": "get_weather", "parameters": {"city": "Paris"}}; '
     '{"name": "now", "parameters": {}}<|python_end|>', "", "", [_PARIS, _NOW]),
    ("llama4_pythonic", '<|python_start|>[get_weather(city="Paris"), now()]<|python_end|>', "", "", [_PARIS, _NOW]),
    ("llama4_pythonic", '[get_weather(city="Paris")]', "", "", [_PARIS]),
    ("pythonic", '[get_weather(city="Paris"), now()]', "", "", [_PARIS, _NOW]),
]  # fmt: skip

# (style, end of the prompt, text, reasoning, answer)
_REASONING: list[tuple[str, str, str, str, str]] = [
    ("deepseek_r1", "<｜Assistant｜><think>\n", "Let me see.\nYes.\n</think>\n\n42", "Let me see.\nYes.", "42"),
    ("deepseek_r1", "<｜Assistant｜>", "<think>\nHm.\n</think>\n\n42", "Hm.", "42"),
    ("deepseek_r1", "<｜Assistant｜></think>", "42", "", "42"),
    ("deepseek_r1", "", "never ends </thi", "never ends </thi", ""),
    ("qwen3", "<|im_start|>assistant\n", "<think>\nHm.\n</think>\n\n42 \n", "Hm.", "42 \n"),
    ("qwen3", "<|im_start|>assistant\n", "42, without <think> at all", "", "42, without <think> at all"),
    ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "42", "", "42"),
    ("qwen3", "<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\n42", "Hm.", "42"),
    ("qwen3", "", "<think>\n\n</think>\n\n42", "", "42"),
    ("gpt_oss", "<|start|>assistant", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
     "<|message|>4 < 5<|return|>", "Hm.", "4 < 5"),
    ("gpt_oss", "<|start|>assistant", "<|channel|>final<|message|>42", "", "42"),
    ("gpt_oss", "", "plain text", "", "plain text"),
    ("granite", "", "Here is my thought process:\nHm.\n\nHere is my response:\n\n42", "Hm.", "42"),
    ("granite", "", "Here's my thought process: Hm. Here's my response: 42", "Hm.", "42"),
    ("granite", "", "<think>Hm.</think>\n<response>42</response>", "Hm.", "42"),
    ("granite", "", "Here is my answer: 42", "", "Here is my answer: 42"),
    ("mistral", "", "[THINK]Hm.[/THINK]42", "Hm.", "42"),
    ("mistral", "", "42 [THINK] later", "", "42 [THINK] later"),
]  # fmt: skip


def _call(style: str, pieces: list[str], certain: bool = False) -> tuple[str, str, list[tuple[str, str]]]:
    parser = TOOL_PARSERS.get(style)(_FUNCTIONS, certain)
    answer = fold([event for piece in pieces for event in parser.feed(piece)] + parser.finish())
    return answer.reasoning, answer.content, [(call.name, call.arguments) for call in answer.calls]


def _reason(style: str, prompt: str, pieces: list[str]) -> tuple[str, str]:
    parser: ReasoningParser = REASONING_PARSERS.get(style)(prompt)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    reasoning = "".join(each.text for each in events if isinstance(each, Reasoning))
    return reasoning, "".join(each.text for each in events if isinstance(each, Visible))


def test_every_style_has_a_transcript() -> None:
    assert {style for style, *_ in _TOOLS} == set(TOOL_PARSERS)
    assert {style for style, *_ in _REASONING} == set(REASONING_PARSERS)


@pytest.mark.parametrize(("style", "text", "reasoning", "content", "calls"), _TOOLS)
def test_calls_at_once_and_at_every_cut(style: str, text: str, reasoning: str, content: str, calls: list[Any]) -> None:
    whole = _call(style, [text])
    assert whole[:2] == (reasoning, content)
    assert [(name, json.loads(arguments)) for name, arguments in whole[2]] == calls
    for certain in (False, True):
        expected = _call(style, [text], certain)
        assert _call(style, list(text), certain) == expected
        for cut in range(len(text) + 1):
            assert _call(style, [text[:cut], text[cut:]], certain) == expected


@pytest.mark.parametrize(("style", "prompt", "text", "reasoning", "answer"), _REASONING)
def test_reasoning_at_once_and_at_every_cut(style: str, prompt: str, text: str, reasoning: str, answer: str) -> None:
    assert _reason(style, prompt, [text]) == (reasoning, answer)
    assert _reason(style, prompt, list(text)) == (reasoning, answer)
    for cut in range(len(text) + 1):
        assert _reason(style, prompt, [text[:cut], text[cut:]]) == (reasoning, answer)


_FRAGMENTS = st.sampled_from([
    "<think>", "</think>", "<thi", "[THINK]", "[/THINK]", "Here is my thought process:", "Here is my response:", "\n",
    "<response>", "</response>", "<|channel|>", "analysis", "final", "commentary", " to=functions.now", "<|message|>",
    "<|end|>", "<|start|>", "assistant", "<|call|>", "{}", "Hello", " ", "<", "é",
])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(style=st.sampled_from(REASONING_PARSERS.names()), fragments=st.lists(_FRAGMENTS, max_size=12), data=st.data())
def test_any_text_in_any_pieces_is_read_the_same(style: str, fragments: list[str], data: st.DataObject) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    prompt = data.draw(st.sampled_from(["", "<think>\n", "</think>", "[THINK]"]))
    assert _reason(style, prompt, pieces) == _reason(style, prompt, [text])
    assert _call("harmony", pieces) == _call("harmony", [text])


def test_reasoning_is_not_held_back_longer_than_needed() -> None:
    parser = REASONING_PARSERS.get("qwen3")("<think>\n")
    assert parser.feed("Let me ") == [Reasoning("Let me")]
    assert parser.feed("see </t") == [Reasoning(" see")]
    assert parser.feed("able>") == [Reasoning(" </table>")]
    assert parser.feed("</think>\n") == []
    assert parser.feed("Yes") == [Visible("Yes")]
