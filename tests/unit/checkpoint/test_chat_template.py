"""Chat templates: rendering, where they are found, bad messages, hostile templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenmill.checkpoint.chat_template import ChatTemplate, directory_template, gguf_template
from tokenmill.checkpoint.tokenizer_files import load_chat_template, load_tokenizer
from tokenmill.errors import CheckpointError, UserError

USER = [{"role": "user", "content": "hi"}]
CHATML = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONVERSATION = [
    {"role": "system", "content": "Be <b>brief</b> & kind."},
    {"role": "user", "content": "Wie spät ist es? 😀"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "time", "arguments": {"zone": "<CET>"}}}],
    },
    {"role": "tool", "content": '{"time": "12:00"}'},
    {"role": "user", "content": "Danke"},
]
TOOLS = [
    {"type": "function", "function": {"name": "time", "description": "a <clock>", "parameters": {"type": "object"}}}
]


class TestRendering:
    def test_tokens_and_generation_prompt(self) -> None:
        template = ChatTemplate(CHATML, bos_token="<s>")
        assert template.render(USER) == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert template.render(USER, add_generation_prompt=False) == "<s><|im_start|>user\nhi<|im_end|>\n"

    def test_text_parts_are_joined_for_templates_that_want_a_string(self) -> None:
        parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
        assert "user\na\nb<|im_end|>" in ChatTemplate(CHATML).render(parts)
        walking = "{% for m in messages %}{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}"
        assert ChatTemplate(walking).render(parts) == "[a][b]"

    def test_helpers_of_hugging_face_templates(self) -> None:
        source = (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.last %}{% break %}{% endif %}"
            "{% set ns.n = ns.n + loop.length %}{% endfor %}{{ ns.n }} {{ {'a': '<é>'} | tojson }} "
            "{% generation %}said{% endgeneration %} {{ [1, 2] | join(',') }} {{ 'a' ~ 1 ~ none }} "
            "{{ strftime_now('%Y') | length }} {{ '%s!' % 'x' }} {{ 123456789 | string }} {{ extra }}"
        )
        rendered = ChatTemplate(source).render(USER * 3, extra="more")
        assert rendered == '6 {"a": "<é>"} said 1,2 a1None 4 x! 123456789 more'

    def test_lines_of_blocks_leave_no_blanks(self) -> None:
        assert ChatTemplate("{% if true %}\n  {% set x = 1 %}\n{{ x }}\n{% endif %}\n").render(USER) == "1\n"

    def test_arguments_of_tool_calls_are_parsed(self) -> None:
        source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
        call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
        assert ChatTemplate(source).render([{"role": "assistant", "tool_calls": [call]}]) == '{"x": 1}'
        assert call["function"]["arguments"] == '{"x": 1}'  # the caller's own is untouched

    @pytest.mark.parametrize("alias", ["smollm2", "qwen2.5-coder-1.5b"])
    @pytest.mark.parametrize("tools", [None, TOOLS])
    def test_same_as_transformers(
        self, model_path: Callable[[str], Path], alias: str, tools: list[dict[str, Any]] | None
    ) -> None:
        utilities = pytest.importorskip("transformers.utils.chat_template_utils")
        template = load_chat_template(model_path(alias))
        assert template is not None
        rendered, _ = utilities.render_jinja_template(
            [CONVERSATION], tools=tools, chat_template=template.source, add_generation_prompt=True
        )
        assert template.render(CONVERSATION, tools=tools) == rendered[0]

    def test_special_tokens_survive_encoding(self, model_path: Callable[[str], Path]) -> None:
        path = model_path("smollm2")
        template, tokenizer = load_chat_template(path), load_tokenizer(path)
        assert template is not None
        ids = tokenizer.encode(template.render(USER), add_special_tokens=False, parse_special=True)
        assert tokenizer.decode(ids, skip_special_tokens=False) == template.render(USER)
        assert [tokenizer.id_to_piece(token_id) for token_id in ids].count("<|im_start|>") == 3


class TestSources:
    def test_gguf(self) -> None:
        assert gguf_template({}) is None
        metadata = {
            "tokenizer.chat_template": "{{ bos_token }}plain",
            "tokenizer.chat_template.tool_use": "{{ tools[0].name }}",
            "tokenizer.ggml.tokens": ["a", "<s>"],
            "tokenizer.ggml.bos_token_id": 1,
        }
        template = gguf_template(metadata)
        assert template is not None
        assert template.render(USER) == "<s>plain"
        assert template.render(USER, tools=[{"name": "clock"}]) == "clock"

    def test_directory(self, tmp_path: Path) -> None:
        assert directory_template(tmp_path) is None
        config = {"chat_template": "{{ eos_token }}one", "eos_token": {"content": "</s>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert _rendered(tmp_path) == "</s>one"
        named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "tools"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        assert _rendered(tmp_path) == "two"
        (tmp_path / "chat_template.jinja").write_text("three")
        assert _rendered(tmp_path) == "three"


def _rendered(path: Path) -> str:
    template = directory_template(path)
    assert template is not None
    return template.render(USER)


class TestBadMessages:
    @pytest.mark.parametrize(
        ("messages", "problem"),
        [
            ("hi", "must be a list"),
            ({"role": "user"}, "must be a list"),
            ([], "no messages"),
            (["hi"], "message 0 is not an object"),
            ([{"content": "hi"}], "message 0 has no role"),
            ([*USER, {"role": "user"}], "message 1 has no content"),
            ([{"role": "user", "content": 5}], "neither text nor a list"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], "not text"),
            ([{"role": "user", "content": "hi", "x": object()}], "holds a object"),
        ],
    )
    def test_refused(self, messages: Any, problem: str) -> None:
        with pytest.raises(UserError, match=problem):
            ChatTemplate(CHATML).render(messages)

    def test_the_templates_own_refusal(self) -> None:
        source = "{% if messages[0].role != 'user' %}{{ raise_exception('only users here') }}{% endif %}"
        with pytest.raises(UserError, match="only users here"):
            ChatTemplate(source).render([{"role": "wizard", "content": "hi"}])

    def test_failure_inside_the_template(self) -> None:
        with pytest.raises(UserError, match="TypeError"):
            ChatTemplate("{{ messages[0].content + 1 }}").render(USER)

    def test_broken_template(self) -> None:
        with pytest.raises(CheckpointError, match="broken"):
            ChatTemplate("{% if %}").render(USER)


class TestHostileTemplates:
    @pytest.mark.parametrize(
        "source",
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ '{0.__class__.__init__}'.format(messages) }}",
            "{{ raise_exception.__globals__ }}",
            "{{ messages.append(1) }}",
            "{% set ns = namespace(__class__=1) %}",
            "{% include 'secret' %}",
        ],
    )
    def test_no_way_out(self, source: str) -> None:
        with pytest.raises(UserError):
            ChatTemplate(source).render(USER)

    @pytest.mark.parametrize(
        "source",
        [
            "{% for i in range(1000000000) %}x{% endfor %}",
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
            "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(30) }}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{% set x = 'a' * 99999 %}{{ x.replace('a', x) }}",
            "{% set x = ['a' * 99999] * 9999 %}{{ x | join }}",
            "{{ 'x' * 10000000000 }}",
            "{{ 9 ** 9 ** 9 }}",
            "{{ 'x'.ljust(10000000000) }}",
            "{{ 'x' | center(10000000000) }}",
            "{{ '%10000000000d' % 1 }}",
            "{{ '%10000000000d' | format(1) }}",
            "{{ '{:10000000000}'.format(1) }}",
        ],
    )
    def test_bounded(self, source: str) -> None:
        with pytest.raises(UserError):
            ChatTemplate(source).render(USER)
