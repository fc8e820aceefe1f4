"""Which style a model has, and what a request's tools mean for its prompt and its output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenmill.checkpoint.chat_template import ChatTemplate
from tokenmill.errors import UserError
from tokenmill.serve.tools.use import ToolStyle, plan_tools
from tokenmill.types import SamplingParams, StructuredSpec

_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "first", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "second"}},
]
_PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
_HERMES = "{% if tools %}{{ tools | tojson }} write <tool_call>{% endif %}" + _PLAIN
_LLAMA = (
    '{% if tools %}Respond {"name": function name, "parameters": dictionary of argument name and its value}{% endif %}'
)
_PYTHONIC = "{% if tools %}[func_name1(params_name1=params_value1, params_name2=params_value2...)]{% endif %}"


class _Tokens:
    """As much of a tokenizer as is asked: one control token."""

    reads_text = True
    special_ids = frozenset({7})

    def __init__(self, marker: bool = False) -> None:
        self._marker = marker

    def encode(self, _text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        assert parse_special
        assert not add_special_tokens
        return [7] if self._marker else [1, 2, 3]


def _style(source: str, name: str = "auto", marker: bool = False, **variants: str) -> ToolStyle:
    return ToolStyle.choose(ChatTemplate(source, variants=variants), _Tokens(marker), name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "parser", "in_template"),
    [
        (_HERMES, "hermes", True),
        (_LLAMA + "<|python_tag|>", "llama3_json", True),
        (_LLAMA, "llama3_json", True),
        (_PYTHONIC, "pythonic", True),
        (_PLAIN, "hermes", False),
        ("{{ tools }}" + _PLAIN, "hermes", True),
    ],
)
def test_the_style_comes_from_the_template(source: str, parser: str, in_template: bool) -> None:
    style = _style(source)
    assert (style.parser.name, style.in_template) == (parser, in_template)
    assert _style(source, "pythonic").parser.name == "pythonic"


def test_the_variant_for_tools_counts() -> None:
    assert _style(_PLAIN, tool_use=_PYTHONIC).parser.name == "pythonic"


def test_a_style_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="hermes"):
        _style(_PLAIN, "hermess")


def test_a_template_without_tools_is_told_in_a_system_message() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "first", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "1"},
    ]
    shown, tools = _style(_PLAIN).for_template(messages, _TOOLS)
    assert tools is None
    assert [message["role"] for message in shown] == ["system", "user", "assistant", "user"]
    assert '"second"' in shown[0]["content"]
    assert shown[2]["content"] == '<tool_call>\n{"name": "first", "arguments": {"a": 1}}\n</tool_call>'
    assert "done" in shown[3]["content"]
    assert _style(_HERMES).for_template(messages, _TOOLS) == (messages, _TOOLS)
    system = [{"role": "system", "content": "Be brief."}, *messages]
    assert _style(_PLAIN).for_template(system, _TOOLS)[0][0]["content"].startswith("Be brief.\n\n")


@pytest.mark.parametrize(
    ("choice", "names", "forced"),
    [
        (None, ["first", "second"], False),
        ("auto", ["first", "second"], False),
        ("required", ["first", "second"], True),
        ({"type": "function", "function": {"name": "second"}}, ["second"], True),
    ],
)
def test_tool_choice(choice: Any, names: list[str], forced: bool) -> None:
    use = plan_tools(_style(_HERMES), _TOOLS, choice, None)
    assert use is not None
    assert ([function.name for function in use.functions], use.forced) == (names, forced)
    structured = use.apply(SamplingParams()).structured
    assert (structured is not None) is forced
    if structured is not None:
        assert all(name in structured.text for name in names)
        assert use.parallel is (choice == "required")


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        (_TOOLS, "none"),
        (None, None),
        ([], "auto"),
    ],
)
def test_no_tools(tools: Any, choice: Any) -> None:
    assert plan_tools(_style(_HERMES), tools, choice, None) is None


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        (None, "required"),
        (_TOOLS, "sometimes"),
        (_TOOLS, {"type": "function", "function": {"name": "third"}}),
        (_TOOLS, {"type": "allowed_tools"}),
        (_TOOLS * 2, "auto"),
    ],
)
def test_choices_that_cannot_be_followed(tools: Any, choice: Any) -> None:
    with pytest.raises(UserError):
        plan_tools(_style(_HERMES), tools, choice, None)


def test_a_format_and_tools_together_allow_either() -> None:
    use = plan_tools(_style(_HERMES), _TOOLS, "auto", None)
    forced = plan_tools(_style(_HERMES), _TOOLS, "required", None)
    assert use is not None
    assert forced is not None
    params = SamplingParams(structured=StructuredSpec("json_schema", json.dumps({"type": "integer"})))
    structured = use.apply(params).structured
    assert structured is not None
    assert structured.kind == "grammar"
    with pytest.raises(UserError):
        forced.apply(params)
    with pytest.raises(UserError):
        use.apply(SamplingParams(structured=StructuredSpec("regex", "a")))


def test_a_marker_that_is_a_control_token_is_made_visible() -> None:
    for marker in (True, False):
        use = plan_tools(_style(_HERMES, marker=marker), _TOOLS, "auto", None)
        assert use is not None
        assert use.apply(SamplingParams()).skip_special_tokens is not marker
