"""Bodies -> our own terms: prompts, messages, sampling parameters, constraints, ignored fields."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tokenmill.serve.api.adapter_protocol import AnthropicBody
from tokenmill.serve.api.anthropic import _as_chat
from tokenmill.serve.api.anthropic_messages import chat_tools
from tokenmill.serve.api.chat import continued
from tokenmill.serve.api.protocol import ChatBody, CompletionBody, GenerationBody, Message, Structured
from tokenmill.serve.api.sampling import build_params, resolve_max_tokens, resolve_truncation
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.errors import ApiError


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
        ([], []),
    ],
)
def test_prompts_in_all_shapes(prompt: Any, prompts: list[Any]) -> None:
    assert CompletionBody.model_validate({"prompt": prompt}).prompts() == prompts


@pytest.mark.parametrize("prompt", [None, 1, [1.5], [True], [-1], [[["a"]]], {"a": 1}])
def test_what_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(ValidationError):
        CompletionBody.model_validate({"prompt": prompt})


def test_unknown_fields_are_named_not_refused() -> None:
    fields: dict[str, Any] = {"prompt": "x", "user": "me", 'evil,\r\n"name': 1, "é": 2}
    assert CompletionBody.model_validate(fields).ignored() == ["user", "evil????name", "?"]
    many = {"prompt": "x", **{f"f{number}": 0 for number in range(40)}}
    assert len(CompletionBody.model_validate(many).ignored()) == 17


def test_sampling_params_take_the_bodys_values() -> None:
    body = ChatBody.model_validate(
        {
            "messages": [{"role": "user", "content": "x"}],
            "temperature": 0.5,
            "top_p": None,
            "seed": -1,
            "stop": "END",
            "logit_bias": {"5": -3},
            "n": 2,
            "max_completion_tokens": 7,
            "max_tokens": 9,
        }
    )
    params = build_params(body, ServeConfig(), resolve_max_tokens(body, 10, 100, None), logprobs=3)
    assert (params.temperature, params.top_p, params.stop, params.n) == (0.5, 1.0, ("END",), 2)
    assert (params.seed, params.logit_bias, params.max_tokens, params.logprobs) == (2**64 - 1, {5: -3.0}, 7, 3)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"top_p": 0}, "top_p"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"min_tokens": 11}, "min_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x"] * 300}, "bad_words"),
        ({"bad_words": ["x" * 5000]}, "bad_words"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
def test_bad_values_are_400_and_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        build_params(GenerationBody.model_validate(fields), ServeConfig(), 10)
    assert caught.value.status == 400
    assert caught.value.param == param


def test_max_tokens_is_refused_not_cut() -> None:
    assert resolve_max_tokens(GenerationBody(), 90, 100, None) == 10
    assert resolve_max_tokens(GenerationBody(), 90, 100, 16) == 10
    assert resolve_max_tokens(GenerationBody(), 50, 100, 16) == 16
    with pytest.raises(ApiError, match="has room for 10"):
        resolve_max_tokens(GenerationBody(max_tokens=11), 90, 100, None)


def test_how_much_of_a_prompt_is_kept() -> None:
    assert resolve_truncation(None, 5, 100) is None
    assert resolve_truncation(30, 5, 100) == 30
    assert resolve_truncation(-1, 5, 100) == 95
    assert resolve_truncation(-1, None, 100) == 99
    for wrong in (0, 101):
        with pytest.raises(ApiError, match="truncate_prompt_tokens"):
            resolve_truncation(wrong, 5, 100)


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("<user>hi<end><bot>So far<end>\n", "So far", "<user>hi<end><bot>So far"),
        ("<user>So<end><bot>So", "So", "<user>So<end><bot>So"),
        ("<bot>So far <end>", "So far ", "<bot>So far "),
        ("<bot>So far<end>", " So far ", "<bot>So far"),
    ],
)
def test_a_prompt_that_ends_within_its_last_message(prompt: str, text: str, expected: str) -> None:
    assert continued(prompt, text) == expected
    for wrong in ("", " ", "gone"):
        with pytest.raises(ApiError, match="continue_final_message"):
            continued(prompt, wrong)


def test_messages_become_plain() -> None:
    parts = Message.model_validate(
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    )
    assert parts.plain() == {"role": "system", "content": "ab"}
    assert Message(role="assistant").plain() == {"role": "assistant", "content": ""}
    image = Message.model_validate({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})
    with pytest.raises(ValueError, match="reads text only"):
        image.plain()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Structured("json_object", "")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
            Structured("json_schema", '{"type":"object"}'),
        ),
        ({"guided_regex": "a+"}, Structured("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, Structured("choice", '["a","b"]')),
        ({"guided_json": {"type": "null"}}, Structured("json_schema", '{"type":"null"}')),
        ({"structured_outputs": {"grammar": "root ::= x"}}, Structured("grammar", "root ::= x")),
        ({"structured_outputs": {"structural_tag": "{}"}}, Structured("structural_tag", "{}")),
        (
            {"response_format": {"type": "structural_tag", "structures": [{"begin": "<"}], "triggers": ["<"]}},
            Structured("structural_tag", '{"structures":[{"begin":"<"}],"triggers":["<"],"format":null}'),
        ),
    ],
)
def test_constraints_in_all_shapes(fields: dict[str, Any], expected: Structured | None) -> None:
    assert GenerationBody.model_validate(fields).structured() == expected


def test_two_constraints_are_refused() -> None:
    body = GenerationBody.model_validate({"guided_regex": "a", "response_format": {"type": "json_object"}})
    with pytest.raises(ValueError, match="more than one"):
        body.structured()


def test_tools_that_the_server_would_have_to_run_are_refused() -> None:
    fields = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    custom, search = {"name": "f", "type": "custom"}, {"name": "web_search", "type": "web_search_20250305"}
    assert len(chat_tools(AnthropicBody.model_validate({**fields, "tools": [custom]}))["tools"]) == 1
    with pytest.raises(ValueError, match="runs no tools"):
        chat_tools(AnthropicBody.model_validate({**fields, "tools": [custom, search]}))


def test_blocks_that_become_too_many_messages_are_refused() -> None:
    blocks = [{"type": "tool_result", "tool_use_id": "a", "content": "x"}] * 5000
    body = AnthropicBody.model_validate({"max_tokens": 1, "messages": [{"role": "user", "content": blocks}]})
    with pytest.raises(ApiError) as caught:
        _as_chat(body)
    assert (caught.value.status, caught.value.param) == (400, "messages")
