"""/v1/responses of a real server on a real model, driven by the official openai client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.serving import RunningServer, serving

_MODEL = "smollm2-test"
_TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def server(model_path: Callable[[str], Path]) -> Iterator[RunningServer]:
    flags = ("--served-model-name", _MODEL, "--context", "512", "--max-num-seqs", "8", "--background-responses")
    with serving(model_path("smollm2"), *flags, "--max-stored-responses", "4") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(autouse=True)
def _nothing_left_behind(server: RunningServer) -> Iterator[None]:
    yield
    server.wait_idle()


def _ask(client: openai.OpenAI, **fields: Any) -> Any:
    wanted = {"model": _MODEL, "input": "Name three colours.", "temperature": 0, "max_output_tokens": 12, **fields}
    return client.responses.create(**wanted)


def test_streamed_is_whole_with_events_in_order(client: openai.OpenAI) -> None:
    _ask(client)
    whole = _ask(client)
    events = list(_ask(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    opening = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"]
    assert kinds[:5] == [f"response.{kind}" for kind in opening]
    ending = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds[-4:] == [f"response.{kind}" for kind in ending]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1].response
    assert (last.output_text, last.status, last.usage.output_tokens) == (whole.output_text, "incomplete", 12)
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output_text


def test_the_answer_is_that_of_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name three colours."}]
    fields: Any = {"model": _MODEL, "temperature": 0, "max_tokens": 12}
    chat = [client.chat.completions.create(messages=messages, **fields) for _ in range(2)][-1]
    assert _ask(client, instructions="Be brief.").output_text == chat.choices[0].message.content


def test_a_conversation_goes_on(client: openai.OpenAI, server: RunningServer) -> None:
    first = _ask(client)
    second = _ask(client, input="And one more?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    assert client.responses.input_items.list(second.id).data[0].type == "message"
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="is not stored here"):
        _ask(client, previous_response_id=first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    unstored = _ask(client, store=False)
    assert server.http.get(f"/v1/responses/{unstored.id}").status_code == 404


def test_the_store_keeps_only_the_newest(client: openai.OpenAI) -> None:
    stored = [_ask(client, max_output_tokens=1).id for _ in range(5)]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(stored[0])
    assert client.responses.retrieve(stored[1]).id == stored[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_and_its_result(client: openai.OpenAI, stream: bool) -> None:
    answer = _ask(client, tools=[_TOOL], tool_choice="required", parallel_tool_calls=False, stream=stream,
                  max_output_tokens=60)  # fmt: skip
    if stream:
        events = list(answer)
        arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
        answer = events[-1].response
        assert answer.output[0].arguments == arguments
    (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    after = _ask(client, input=output, previous_response_id=answer.id, tools=[_TOOL])
    assert after.output_text or after.output


def test_a_format_is_kept(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    assert _ask(client, text=text, max_output_tokens=40).output_text.startswith("{")


def test_in_the_background(client: openai.OpenAI) -> None:
    begun = _ask(client, background=True, max_output_tokens=40)
    assert begun.status == "queued"
    found = begun
    while found.status in ("queued", "in_progress"):
        found = client.responses.retrieve(begun.id)
    assert found.status in ("completed", "incomplete")
    assert found.output_text
    long = _ask(client, background=True, max_output_tokens=400)
    assert client.responses.cancel(long.id).status in ("cancelled", "incomplete", "completed")
    with pytest.raises(openai.BadRequestError, match="stored and not streamed"):
        _ask(client, background=True, store=False)


def test_what_is_not_supported_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="runs no tools"):
        _ask(client, tools=[{"type": "web_search"}])
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        _ask(client, conversation="c1")
    with pytest.raises(openai.BadRequestError, match="text only"):
        _ask(client, input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "auto"}]}])
