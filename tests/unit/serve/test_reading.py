"""Bodies as bytes: what is read, what is refused, and that a refusal costs no object for each bad element."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError
from starlette.requests import Request

from tokenmill.serve.api import reading
from tokenmill.serve.api.adapter_protocol import AnthropicBody, OllamaChatBody, OllamaGenerateBody
from tokenmill.serve.api.exchange import ClientGoneError, Record
from tokenmill.serve.api.protocol import (
    MAX_MESSAGES,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    GenerationBody,
    TokenizeBody,
)
from tokenmill.serve.api.reading import MAX_CONTAINERS, MAX_DEPTH, MAX_STRINGS, check_prompts, read_body
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.errors import ApiError
from tokenmill.serve.metrics import Metrics
from tokenmill.serve.service import Service
from tokenmill.serve.tenants.accounts import Accounts
from tokenmill.serve.tenants.keys import Client
from tokenmill.serve.tenants.limits import Admission, Pace
from tokenmill.serve.tenants.turns import Turns

_MODELS = (
    CompletionBody,
    ChatBody,
    EmbeddingBody,
    TokenizeBody,
    DetokenizeBody,
    OllamaChatBody,
    OllamaGenerateBody,
    AnthropicBody,
)
_USER = {"role": "user", "content": "x"}


class _Service(SimpleNamespace):
    """What reading needs of a Service."""

    def __init__(self, context: int = 128) -> None:
        super().__init__(context=context, config=ServeConfig(), refuses=None, turns=Turns())

    def check_client(self, _client: Client) -> None:
        if self.refuses is not None:
            raise self.refuses


def _read(
    data: bytes,
    model: type[Body] = CompletionBody,
    content_type: str = "application/json",
    service: _Service | None = None,
    leaves: bool = False,
    path: str = "/",
    headers: dict[str, str] | None = None,
) -> Any:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"} if leaves else {"type": "http.request", "body": data, "more_body": False}

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [
            (name.encode(), value.encode()) for name, value in {"content-type": content_type, **(headers or {})}.items()
        ],
        "state": {"record": Record("id", Client())},
    }
    return asyncio.run(read_body(Request(scope, receive), cast(Service, service or _Service()), model))


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    "text",
    ["plain", "\0", "\u202e\u2066bidi", "\U0001f600" * 50, "e" + "\u0301" * 5000, '"\\[{,\\\\"', "\ufeff", "\uffff"],
)
def test_any_text_comes_through_as_sent(text: str) -> None:
    assert _read(_json({"prompt": text})).prompt == text
    assert _read(json.dumps({"prompt": text}, ensure_ascii=False).encode()).prompt == text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"{} x",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\xc0\x80"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e400}',
        b'{"prompt": "x", "seed": ' + b"1" * 100_000 + b"}",
        b"\xef\xbb\xbf{}",
        '{"prompt": "x"}'.encode("utf-16"),
        b"[" * 10_000,
        b'{"a":' * 10_000,
        b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
    ],
    ids=lambda data: repr(data[:40]),
)
def test_what_is_no_json_is_400(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        _read(data)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 10**400},
        {"n": 1.5},
        {"temperature": 10**400},
        {"logit_bias": {"1": 10**400}},
        {"stop_token_ids": [True]},
        {"stop_token_ids": [10**400]},
        {"cache_control": {"ttl": 10**400}},
        {"priority": 101},
        {"prompt": [1.0]},
        {"prompt": [2**31]},
        {"prompt": [-1]},
    ],
    ids=str,
)
def test_numbers_out_of_range_are_400_and_not_repeated(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        _read(_json({"prompt": "x", **fields}))
    assert (caught.value.status, caught.value.param) == (400, next(iter(fields)))
    assert len(caught.value.message) < 200


def test_values_that_json_may_write_in_several_ways() -> None:
    body = _read(b'{"prompt": "x", "prompt": "y", "n": 2.0, "seed": -0, "temperature": -0.0}')
    assert (body.prompt, body.n, body.seed, body.temperature) == ("y", 2, 0, 0.0)


@pytest.mark.parametrize("model", _MODELS)
@pytest.mark.parametrize("data", [b"null", b"[]", b'"x"', b"1", b"true"])
def test_a_body_is_an_object(model: type[Body], data: bytes) -> None:
    with pytest.raises(ApiError, match="the body: "):
        _read(data, model)


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_only_declared_json_is_read(content_type: str) -> None:
    with pytest.raises(ApiError, match="content-type"):
        _read(_json({"prompt": "x"}), content_type=content_type)
    for good in ("application/json", "application/json; charset=utf-8", "application/problem+json"):
        assert _read(_json({"prompt": "x"}), content_type=good).prompt == "x"


def test_what_has_no_type_is_read_where_ollamas_examples_go() -> None:
    """Browsers tell where a POST comes from; theirs are refused as ever."""
    fields = {"prompt": "x", "model": "m"}
    for kind in ("application/x-www-form-urlencoded", ""):
        assert _read(_json(fields), OllamaGenerateBody, content_type=kind, path="/api/generate").prompt == "x"
        for header in ("origin", "sec-fetch-site"):
            with pytest.raises(ApiError, match="content-type"):
                _read(_json(fields), OllamaGenerateBody, content_type=kind, path="/api/generate", headers={header: "x"})


# --- early failure: the number of errors, not the time ---

_BAD = [
    (CompletionBody, {"prompt": [*[1] * 9999, "x"]}),
    (CompletionBody, {"prompt": ["x", *[None] * 9999]}),
    (CompletionBody, {"prompt": [["x"]] * 9999}),
    (CompletionBody, {"prompt": "x", "logit_bias": {str(number): "x" for number in range(9999)}}),
    (CompletionBody, {"prompt": "x", "stop": [1] * 9999}),
    (CompletionBody, {"prompt": "x", "guided_choice": [None] * 9999}),
    (CompletionBody, {"prompt": "x", "stop_token_ids": ["x"] * 9999}),
    (ChatBody, {"messages": [{}] * 9999}),
    (ChatBody, {"messages": [1] * 9999}),
    (ChatBody, {"messages": [_USER] * 9999}),
    (ChatBody, {"messages": [{"role": "user", "content": [1] * 9999}]}),
    (ChatBody, {"messages": [_USER], "tools": [[]] * 9999}),
    (EmbeddingBody, {"input": [{}] * 9999}),
    (DetokenizeBody, {"tokens": ["x"] * 9999}),
    (TokenizeBody, {"messages": [{"role": 1}] * 9999}),
    (OllamaChatBody, {"messages": [{}] * 9999}),
    (OllamaChatBody, {"messages": [_USER], "options": {"stop": [1] * 9999}}),
    (OllamaGenerateBody, {"prompt": "x", "context": [None] * 9999}),
    (AnthropicBody, {"max_tokens": 1, "messages": [{"role": "x"}] * 9999}),
    (AnthropicBody, {"max_tokens": 1, "messages": [_USER], "system": [1] * 9999}),
]


@pytest.mark.parametrize(("model", "value"), _BAD, ids=lambda value: str(value)[:60])
def test_a_long_bad_list_is_few_errors(model: type[Body], value: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(value)
    assert caught.value.error_count() <= 4


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (b'{"messages": [' + b"{}," * MAX_CONTAINERS + b"{}]}", "lists and objects"),
        (b'{"x": [' + b"[]," * MAX_CONTAINERS + b"0]}", "lists and objects"),
        (b'{"x": [' + b'"",' * MAX_STRINGS + b"0]}", "strings"),
        (b"{" + b'"n":1,' * MAX_STRINGS + b'"n":1}', "strings"),
        (b'{"prompt": [' + b"1," * (reading.MAX_VALUES + 1) + b"1]}", "values"),
    ],
    ids=("messages", "lists", "strings", "keys", "values"),
)
def test_too_many_parts_are_refused_before_they_are_parsed(
    value: bytes, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "parse", lambda _data: pytest.fail("parsed"))
    with pytest.raises(ApiError, match=f"more than .* {what}"):
        _read(value)


def test_a_longer_context_allows_as_many_token_ids() -> None:
    ids = b'{"prompt": [' + b"1," * reading.MAX_VALUES + b"1]}"
    assert len(_read(ids, service=_Service(context=2 * reading.MAX_VALUES)).prompt) == reading.MAX_VALUES + 1


def test_what_is_inside_strings_counts_as_nothing() -> None:
    text = '{[",\\"]}' * MAX_CONTAINERS + "\\"
    assert _read(_json({"prompt": text})).prompt == text


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_slices_never_cut_an_escape(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the cuts fall, the same structure is found."""
    monkeypatch.setattr(reading, "_SLICE", size)
    text = ['\\"[', "\\\\", "a\\\\\\", '"', "[[[["]
    nested: Any = 0
    for _ in range(MAX_DEPTH - 2):
        nested = [nested]
    value = {"prompt": text, "x": [nested], "y": [[]] * MAX_DEPTH}
    assert _read(_json(value)).prompt == text
    with pytest.raises(ApiError, match="nested deeper"):
        _read(_json({**value, "x": [[nested]]}))


def test_depth_is_exact() -> None:
    def nested(depth: int) -> bytes:
        return b'{"prompt": "x", "x": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    assert _read(nested(MAX_DEPTH)).prompt == "x"
    with pytest.raises(ApiError, match="nested deeper"):
        _read(nested(MAX_DEPTH + 1))


def test_messages_are_bounded() -> None:
    few = [_USER] * (MAX_MESSAGES // 2)
    assert len(_read(_json({"messages": few}), ChatBody).messages) == len(few)
    with pytest.raises(ApiError, match="at most"):
        _read(_json({"messages": [{"role": "u"}] * (MAX_MESSAGES + 1)}), ChatBody)


def test_a_key_without_quota_is_refused_before_its_body_is_read() -> None:
    service = _Service()
    service.refuses = ApiError(429, "used up", code="request_quota")
    with pytest.raises(ApiError, match="used up"):
        _read(b"{", service=service, leaves=True)


def test_what_never_enters_the_engine_is_metered_like_the_rest() -> None:
    client = Client("k", requests_per_minute=2, tokens_per_minute=1000, max_parallel=1)
    service = Service.__new__(Service)  # only its bookkeeping
    service.admission, service.metrics = Admission(1, 1, 1, Pace()), Metrics("model")
    service.accounts = Accounts("model", None, service.metrics.add, 1, 0.0)
    with service.metered(client) as charged:
        charged.append(300)
        with pytest.raises(ApiError, match="in flight"):
            service.check_client(client)
    assert client.num_active == 0
    with pytest.raises(ValueError, match="broken"), service.metered(client):
        raise ValueError("broken")
    assert client.num_active == 0
    assert client.tokens is not None
    assert client.tokens.level == pytest.approx(700, abs=5)
    service.charge(client)  # a refusal
    with pytest.raises(ApiError) as caught, service.metered(client):
        pytest.fail("admitted")
    assert (caught.value.status, caught.value.code) == (429, "request_quota")


def test_a_client_that_leaves_while_sending() -> None:
    with pytest.raises(ClientGoneError):
        _read(b"", leaves=True)


# --- limits from the configuration ---


def test_the_default_body_limit_follows_the_context() -> None:
    assert ServeConfig().for_context(8192).max_body_bytes == (1 << 20) + 32 * 8192
    assert ServeConfig().for_context(1 << 20).max_body_bytes == 8 << 20
    assert ServeConfig(max_body_bytes=77).for_context(8192).max_body_bytes == 77


def test_token_ids_beyond_the_context_are_refused_first() -> None:
    service = cast(Service, _Service(context=4))
    assert check_prompts([[1, 2, 3, 4], "text"], service, "prompt") == [[1, 2, 3, 4], "text"]
    with pytest.raises(ApiError) as caught:
        check_prompts([[1], [1] * 5], service, "input")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    for number in (0, 65):
        with pytest.raises(ApiError, match="prompts in one request"):
            check_prompts(["x"] * number, service, "prompt")


@pytest.mark.parametrize("model", _MODELS)
def test_the_openapi_schema_stands_by_itself(model: type[Body]) -> None:
    described = reading.body_schema(model)["requestBody"]
    schema = described["content"]["application/json"]["schema"]
    assert described["required"]
    assert schema["properties"]
    assert "$ref" not in json.dumps(schema)


# --- nothing is dropped in silence ---

_TEMPLATE = "{{ message.reasoning_content }}{{ enable_thinking }}"


@pytest.mark.parametrize(
    ("model", "fields", "names"),
    [
        (CompletionBody, {"prompt": "x", "user": "me"}, ["user"]),
        (GenerationBody, {"response_format": {"type": "text", "a": 1}}, ["response_format.a"]),
        (
            GenerationBody,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "description": "d"}}},
            ["response_format.json_schema.description"],
        ),
        (GenerationBody, {"structured_outputs": {"regex": "a", "x": 1}}, ["structured_outputs.x"]),
        (GenerationBody, {"stream_options": {"include_usage": True}}, ["stream_options"]),
        (GenerationBody, {"stream": True, "stream_options": {"include_usage": True, "z": 1}}, ["stream_options.z"]),
        (
            GenerationBody,
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            ["stream_options.continuous_usage_stats"],
        ),
        (ChatBody, {"messages": [{**_USER, "reasoning_content": "r"}]}, []),
        (ChatBody, {"messages": [{**_USER, "refusal": "r"}, {**_USER, "refusal": "r"}]}, ["messages.refusal"]),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
            ["messages.content.b"],
        ),
        (
            ChatBody,
            {"messages": [_USER], "chat_template_kwargs": {"enable_thinking": True, "colour": 1}},
            ["chat_template_kwargs.colour"],
        ),
        (
            ChatBody,
            {"messages": [_USER], "tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            ["tools.function.strict"],
        ),
        (TokenizeBody, {"messages": [_USER], "add_special_tokens": False}, ["add_special_tokens"]),
        (
            OllamaChatBody,
            {"messages": [_USER], "keep_alive": "5m", "options": {"num_gpu": 1, "num_keep": 4, "top_k": 3}},
            ["options.num_gpu", "options.num_keep"],
        ),
        (OllamaGenerateBody, {"prompt": "x", "raw": True, "system": "s"}, ["system"]),
        (
            AnthropicBody,
            {
                "max_tokens": 1,
                "metadata": {},
                "messages": [{"role": "user", "content": [{"type": "tool_result", "is_error": True}]}],
                "system": [{"type": "text", "text": "s", "citations": []}],
                "tools": [{"name": "f", "input_schema": {}, "defer": 1}],
                "tool_choice": {"type": "auto", "w": 1},
            },
            ["metadata", "messages.content.is_error", "system.citations", "tools.defer", "tool_choice.w"],
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_fields_that_nothing_reads_are_named(model: type[Body], fields: dict[str, Any], names: list[str]) -> None:
    assert model.model_validate(fields).ignored(_TEMPLATE) == names
