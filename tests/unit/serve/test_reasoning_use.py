"""Which reasoning style a model has, and what it means for sampling: visible markers, constraints, budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tokenmill.checkpoint.chat_template import ChatTemplate
from tokenmill.errors import UserError
from tokenmill.registry import load_plugin
from tokenmill.serve.api.tool_messages import AnswerReader, delta_of, message_of
from tokenmill.serve.reasoning import REASONING_PARSERS
from tokenmill.serve.reasoning.use import ReasoningStyle, switch_variables
from tokenmill.serve.tools import TOOL_PARSERS
from tokenmill.serve.tools.base import fold
from tokenmill.serve.tools.use import ToolStyle, plan_tools
from tokenmill.types import ReasoningBudget, SamplingParams, StructuredSpec

_QWEN = "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}"
_OPEN, _INSIDE, _CLOSED = "assistant\n", "assistant\n<think>\n", "<think>\n\n</think>\n\n"
_TOOLS: list[Any] = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]


class _Tokens:
    """Tags are one token each; special if told so."""

    reads_text = True

    def __init__(self, special: bool = False) -> None:
        self.special_ids = frozenset({7, 8}) if special else frozenset()

    def encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        assert parse_special
        assert not add_special_tokens
        return {"<think>": [7], "</think>": [8], "[THINK]": [7], "[/THINK]": [8]}.get(text, [1, 2])


def _style(source: str, name: str = "auto", special: bool = False) -> ReasoningStyle:
    return ReasoningStyle.choose(ChatTemplate(source), _Tokens(special), name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "parser"),
    [
        (_QWEN, "qwen3"),
        ("{{ '<｜Assistant｜><think>\n' }}{{ content.split('</think>') }}", "deepseek_r1"),
        ("<|start|>assistant<|channel|>final<|message|>", "gpt_oss"),
        ("Write your thoughts after 'Here is my thought process:'", "granite"),
        ("<|start_of_role|> <think></think>", "granite"),
        ("[SYSTEM_PROMPT] [THINK]", "mistral"),
        ("{{ messages }}", None),
    ],
)
def test_the_style_comes_from_the_template(source: str, parser: str | None) -> None:
    style = _style(source)
    assert (style.parser.name if style.parser else None) == parser
    assert _style(source, "none").parser is None
    with pytest.raises(UserError, match="qwen3"):
        _style(source, "qwen33")


def test_markers_that_are_control_tokens_are_made_visible() -> None:
    for special in (True, False):
        params = _style("[THINK]", special=special).apply(SamplingParams(), "")
        assert params.skip_special_tokens is not special
    assert _style("").apply(SamplingParams(), "") == SamplingParams()


@pytest.mark.parametrize(
    ("prompt", "texts", "wrong"),
    [
        (_INSIDE, ['Hm, {"a".</think>\n\n{"a": 1}', '</think>{"a": 1}'], ['{"a": 1}', 'x</think>{"b"']),
        (_OPEN, ['<think>Hm.\n</think>\n\n{"a": 1}', '{"a": 1}'], ["Hm.", '<think></think>{"b"']),
        (_CLOSED, ['{"a": 1}'], ["<think>"]),
    ],
)
@pytest.mark.parametrize("kind", ["json_schema", "tools"])
def test_a_constraint_begins_after_the_reasoning(prompt: str, texts: list[str], wrong: list[str], kind: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    style = _style(_QWEN)
    params = SamplingParams(structured=StructuredSpec("json_schema", json.dumps(schema)))
    if kind == "tools":
        use = plan_tools(ToolStyle.choose(None, _Tokens(), "hermes"), _TOOLS, "auto", None)  # type: ignore[arg-type]
        assert use is not None
        params = use.apply(params)
    spec = style.apply(params, prompt).structured
    assert spec is not None
    lark = spec.text if spec.kind == "grammar" else f"start: %json {spec.text}"

    def accepted(text: str) -> bool:
        matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(lark), log_level=0)
        assert not matcher.get_error()
        return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()

    assert all(map(accepted, texts))
    assert not any(map(accepted, wrong))
    assert (style.reader(prompt, spec) is None) is (prompt == _CLOSED)


def test_a_constraint_that_cannot_wait_leaves_no_reasoning() -> None:
    style, spec = _style(_QWEN), StructuredSpec("regex", "[0-9]+")
    assert style.apply(SamplingParams(structured=spec), _INSIDE).structured == spec
    assert style.reader(_INSIDE, spec) is None
    assert style.reader(_INSIDE, None) is not None


def test_whether_an_output_may_reason_depends_on_its_constraint_not_on_words_in_it() -> None:
    style = _style(_QWEN)
    for spec in (StructuredSpec("regex", "thought[s]?"), StructuredSpec("json_schema", '{"title": "thought["}')):
        assert style.reader(_INSIDE, spec) is None
    tags = StructuredSpec("structural_tag", '{"structures": [], "triggers": []}')  # text is free before a trigger
    assert style.apply(SamplingParams(structured=tags), _INSIDE).structured == tags
    assert style.reader(_INSIDE, tags) is not None


def test_a_model_whose_template_has_no_reasoning_is_left_alone() -> None:
    style = _style("{% for m in messages %}{{ m.content }}{% endfor %}")
    spec = StructuredSpec("json_object")
    for params in (SamplingParams(), SamplingParams(structured=spec)):
        assert style.apply(params, _INSIDE) is params
    assert style.reader(_INSIDE, None) is None
    assert AnswerReader(None, style.reader(_INSIDE, None)).plain


def test_budgets() -> None:
    style = _style(_QWEN)
    assert style.apply(SamplingParams(), _INSIDE, 5).reasoning == ReasoningBudget(5, 8, None)
    assert style.apply(SamplingParams(), _OPEN, 5).reasoning == ReasoningBudget(5, 8, 7)
    assert style.apply(SamplingParams(), _CLOSED, 5).reasoning is None
    for other in (_style(""), _style("<|channel|><|message|>")):
        with pytest.raises(UserError, match="thinking_token_budget"):
            other.apply(SamplingParams(), "", 5)


def test_tokens_of_the_reasoning_are_counted_up_to_its_end() -> None:
    assert _style(_QWEN).num_tokens([7, 3, 4, 8, 5, 6]) == 4
    assert _style(_QWEN).num_tokens([7, 3, 4]) == 3
    assert _style("Here is my thought process:").num_tokens([1, 2]) is None


def test_switches_of_templates() -> None:
    assert switch_variables(_QWEN, False) == {"enable_thinking": False}
    assert switch_variables("{% if thinking %}", True) == {"thinking": True}
    assert switch_variables("{{ messages }}", True) == {}


def test_reasoning_then_a_call_in_one_answer() -> None:
    use = plan_tools(ToolStyle.choose(None, _Tokens(), "hermes"), _TOOLS, "auto", None)  # type: ignore[arg-type]
    reader = AnswerReader(use, _style(_QWEN).reader(_INSIDE, None))
    text = 'I need the time.</think>\n\nWait.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    events = [event for character in text for event in reader.read(character, False)] + reader.read("", True)
    answer = fold(events)
    assert (answer.reasoning, answer.content, len(answer.calls)) == ("I need the time.", "Wait.", 1)
    assert reader.finish_reason("stop") == "tool_calls"
    assert message_of(answer)["reasoning_content"] == "I need the time."
    assert delta_of(events[0]) == {"reasoning_content": "I"}


def test_a_call_within_the_reasoning_is_none() -> None:
    use = plan_tools(ToolStyle.choose(None, _Tokens(), "hermes"), _TOOLS, "auto", None)  # type: ignore[arg-type]
    reader = AnswerReader(use, _style(_QWEN).reader(_INSIDE, None))
    answer = fold(reader.read('<tool_call>{"name": "now"}</tool_call></think>No.', True))
    assert (answer.content, answer.calls) == ("No.", [])


_PLUGIN = """
from tokenmill.serve.reasoning import REASONING_PARSERS
from tokenmill.serve.reasoning.qwen3 import Qwen3
from tokenmill.serve.tools import TOOL_PARSERS
from tokenmill.serve.tools.hermes import Hermes

class Mine(Hermes):
    name = "mine"

class Musing(Qwen3):
    name = "musing"

TOOL_PARSERS.register("mine", Mine)
REASONING_PARSERS.register("musing", Musing)
"""


def test_a_plugin_brings_parsers(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(_PLUGIN)
    load_plugin(str(file))
    try:
        assert ToolStyle.choose(None, _Tokens(), "mine").parser.name == "mine"  # type: ignore[arg-type]
        assert _style("", "musing").parser is REASONING_PARSERS.get("musing")
    finally:
        TOOL_PARSERS.unregister("mine")
        REASONING_PARSERS.unregister("musing")


@pytest.mark.parametrize("text", ["import nothing_like_it", "1 +", None])
def test_a_plugin_that_cannot_be_loaded_is_the_users_error(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "broken.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match="plugin"):
        load_plugin(str(file))


def test_names_of_vllm_are_understood() -> None:
    for alias, name in {"openai": "harmony", "deepseek_r1": "deepseek_v3", "qwen3_xml": "qwen3_coder"}.items():
        assert ToolStyle.choose(None, _Tokens(), alias).parser.name == name  # type: ignore[arg-type]
    assert _style("", "openai_gptoss").parser is REASONING_PARSERS.get("gpt_oss")
