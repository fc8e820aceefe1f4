"""/v1/responses without a model: items, the order of events, the store, what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tokenmill.serve.api.response_store import ResponseStore, StoredResponse
from tokenmill.serve.api.responses_items import OutputItems, input_messages
from tokenmill.serve.api.responses_protocol import ResponsesBody, chat_body
from tokenmill.serve.errors import ApiError
from tokenmill.serve.reasoning.base import Reasoning
from tokenmill.serve.tools.base import CallArguments, CallEnd, CallStart, Content, ToolEvent

_EVENTS: list[ToolEvent] = [
    Reasoning("Hm"), Reasoning("."), Content("Hel"), Content("lo"), CallStart(0, "call_1", "now"),
    CallArguments(0, '{"a"'), CallArguments(0, ": 1}"), CallEnd(0), CallStart(1, "call_2", "now"), CallEnd(1),
]  # fmt: skip


def _stream(events: list[ToolEvent], status: str = "completed") -> tuple[OutputItems, list[tuple[str, dict[str, Any]]]]:
    output = OutputItems()
    said = [each for event in events for each in output.take(event)]
    return output, said + list(output.finish(status))


def test_events_come_in_openais_order() -> None:
    _, said = _stream(_EVENTS)
    kinds = [kind.removeprefix("response.") for kind, _ in said]
    part = ["output_item.added", "content_part.added"]
    done = ["content_part.done", "output_item.done"]
    call = ["output_item.added", *["function_call_arguments.delta"] * 2, "function_call_arguments.done"]
    assert kinds == [
        *part, "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", *done,
        *part, "output_text.delta", "output_text.delta", "output_text.done", *done,
        *call, "output_item.done",
        "output_item.added", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip


def test_the_official_client_reads_every_event() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    _, said = _stream(_EVENTS)
    for number, (kind, fields) in enumerate(said):
        assert adapter.validate_python({"type": kind, "sequence_number": number, **fields}).type == kind


def test_items_hold_what_the_events_said() -> None:
    output, said = _stream(_EVENTS)
    assert [item["type"] for item in output.items] == ["reasoning", "message", "function_call", "function_call"]
    assert output.items[0]["content"][0]["text"] == "Hm."
    assert output.items[1]["content"][0]["text"] == "Hello"
    assert output.items[2]["arguments"] == '{"a": 1}'
    assert [item["status"] for item in output.items] == ["completed"] * 4
    done = [fields["item"] for kind, fields in said if kind == "response.output_item.done"]
    assert done == output.items
    added = [fields["item"] for kind, fields in said if kind == "response.output_item.added"]
    assert all(item["status"] == "in_progress" and not item.get("content") for item in added)
    (message,) = output.messages()
    assert (message["content"], message["reasoning_content"], len(message["tool_calls"])) == ("Hello", "Hm.", 2)


def test_an_answer_that_was_cut_and_an_empty_one() -> None:
    output, _ = _stream([Content("Hel")], "incomplete")
    assert output.items[0]["status"] == "incomplete"
    empty, said = _stream([])
    assert [item["type"] for item in empty.items] == ["message"]
    assert empty.items[0]["content"][0]["text"] == ""
    assert said[0][0] == "response.output_item.added"


def test_input_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
    messages = input_messages(
        [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "What "}, {"type": "input_text", "text": "time?"}],
            },
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            call,
            {"type": "function_call_output", "call_id": "c1", "output": "noon"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Noon."}]},
            {"role": "developer", "content": "Be brief."},
        ]
    )
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "developer"]
    assert messages[0]["content"] == "What time?"
    assert (messages[1]["reasoning_content"], messages[1]["tool_calls"][0]["id"]) == ("Hm.", "c1")
    assert input_messages("Hi") == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
        {"role": "user"},
        {"role": "robot", "content": "x"},
        {"type": "item_reference", "id": "msg_1"},
        {"type": "computer_call"},
        {"type": "function_call_output", "call_id": "c1"},
        {"role": "user", "content": [5]},
    ],
)
def test_items_that_are_not_text_are_refused(item: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="input item 0"):
        input_messages([item])


def _chat(**fields: Any) -> Any:
    return chat_body(ResponsesBody.model_validate({"input": "Hi", **fields}), [{"role": "user", "content": "Hi"}])


def test_fields_reach_the_chat_body() -> None:
    tool = {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": True}
    chat = _chat(
        max_output_tokens=7,
        temperature=0.5,
        top_k=3,
        tools=[tool],
        tool_choice={"type": "function", "name": "now"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}},
        reasoning={"effort": "low"},
    )
    assert (chat.output_limit(), chat.temperature, chat.top_k) == (7, 0.5, 3)
    assert chat.tools[0]["function"]["name"] == "now"
    assert chat.tool_choice == {"type": "function", "function": {"name": "now"}}
    assert chat.response_format.json_schema.schema_ == {"type": "integer"}
    assert chat.reasoning_effort == "low"


def test_allowed_tools_are_those_that_may_be_called() -> None:
    tools = [{"type": "function", "name": name} for name in ("now", "later")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "later"}]}
    chat = _chat(tools=tools, tool_choice=choice)
    assert [tool["function"]["name"] for tool in chat.tools] == ["later"]
    assert chat.tool_choice == "required"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "web_search"}]},
        {"tool_choice": {"type": "file_search"}},
        {"text": {"format": {"type": "json_schema", "name": "n"}}},
    ],
)
def test_what_cannot_be_said_to_chat_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises((ValueError, ApiError)):
        _chat(**fields)


@pytest.mark.parametrize("field", [{"conversation": "c"}, {"prompt": {"id": "p"}}, {"top_logprobs": 2}, {"n": 2}])
def test_fields_that_are_not_supported_are_named(field: dict[str, Any]) -> None:
    refusal = ResponsesBody.model_validate({"input": "Hi", **field}).refusal()
    assert refusal is not None
    assert refusal[0] in field
    assert ResponsesBody.model_validate({"input": "Hi"}).refusal() is None


def _stored(name: str, text: str = "") -> StoredResponse:
    return StoredResponse({"id": name}, [], [{"role": "user", "content": text}])


def test_the_store_is_bounded_per_key_and_forgets_the_oldest() -> None:
    store = ResponseStore(2, 10_000)
    for name in ("a", "b", "c"):
        store.put("one", _stored(name))
    store.put("two", _stored("d"))
    assert [store.get("one", name) is not None for name in "abcd"] == [False, True, True, False]
    assert store.get("two", "d") is not None
    store.get("one", "b")  # used: c is the oldest now
    store.put("one", _stored("e"))
    assert store.get("one", "c") is None


def test_the_store_is_bounded_in_bytes() -> None:
    store = ResponseStore(100, 10_000)
    for number in itertools.count():
        store.put("one", _stored(str(number), "x" * 3000))
        if number == 10:
            break
    kept = [number for number in range(11) if store.get("one", str(number)) is not None]
    assert kept == [9, 10] or kept == [8, 9, 10]
    store.put("one", _stored("huge", "x" * 20_000))
    assert store.get("one", "huge") is None
    assert ResponseStore(0, 10_000).put("one", _stored("a")) is None


def test_a_response_can_be_removed_and_replaced() -> None:
    store = ResponseStore(2, 10_000)
    store.put("one", _stored("a", "old"))
    store.put("one", _stored("a", "new"))
    found = store.get("one", "a")
    assert found is not None
    assert found.messages[0]["content"] == "new"
    assert store.remove("one", "a")
    assert not store.remove("one", "a")
