"""The official client of Anthropic: messages, streams, tools, errors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import CITIES, MODEL
from tests.e2e.serving import RunningServer

anthropic = pytest.importorskip("anthropic", reason="make test-clients installs it")

_MESSAGES: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
_TOOL: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": list(CITIES)}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(server: RunningServer) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


def test_messages_and_their_stream_helper(client: Any) -> None:
    fields = {"model": MODEL, "messages": _MESSAGES, "max_tokens": 16, "system": "Be brief."}
    whole = client.messages.create(**fields)
    assert whole.content[0].text
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 16
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_used_and_its_result_taken(client: Any, streamed: bool) -> None:
    choice = {"type": "tool", "name": "get_weather"}
    fields = {"model": MODEL, "messages": _MESSAGES, "max_tokens": 64, "tools": [_TOOL], "tool_choice": choice}
    if streamed:
        with client.messages.stream(**fields) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**fields)
    use = next(block for block in message.content if block.type == "tool_use")
    assert message.stop_reason == "tool_use"
    assert use.input["city"] in CITIES
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Sunny, 20 degrees."}
    follow_up = [
        *_MESSAGES,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(model=MODEL, messages=follow_up, max_tokens=8, tools=[_TOOL])
    assert answer.role == "assistant"


def test_cached_prompts_are_counted(client: Any) -> None:
    system = [{"type": "text", "text": "A long instruction. " * 40, "cache_control": {"type": "ephemeral"}}]
    for _ in range(2):
        usage = client.messages.create(model=MODEL, messages=_MESSAGES, max_tokens=1, system=system).usage
    assert usage.cache_read_input_tokens > 100


def test_errors_are_the_clients_own(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", messages=_MESSAGES, max_tokens=4)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=MODEL, messages=_MESSAGES, max_tokens=100_000)
