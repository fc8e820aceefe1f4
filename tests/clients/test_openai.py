"""The official client of OpenAI: chat, streams, tools, JSON, responses, embeddings, errors."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.clients.conftest import CITIES, MODEL

MESSAGES: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(CITIES)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]
    sunny: bool


@pytest.fixture
def client(v1: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=v1, api_key="none", max_retries=0, timeout=60)


def test_chat_and_its_stream_helper(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 64, "stop": ["e"]}  # the helper wants an end
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].message.content
    with client.chat.completions.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 0


def test_tools_are_called_and_answered(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "max_tokens": 64}
    fields |= {"tool_choice": "required", "parallel_tool_calls": False}
    message = client.chat.completions.create(**fields).choices[0].message
    call: Any = message.tool_calls[0]  # type: ignore[index]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in CITIES
    with client.chat.completions.stream(**fields) as stream:
        streamed: Any = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed[0].function.arguments == call.function.arguments
    follow_up = [*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 20 degrees."}]
    answer = client.chat.completions.create(model=MODEL, messages=follow_up, tools=[TOOL], max_tokens=8)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_a_pydantic_model_is_what_comes_back(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Weather, max_tokens=48)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    answer = client.responses.parse(
        model=MODEL, input="The weather in Rome?", text_format=Weather, max_output_tokens=48
    )
    assert isinstance(answer.output_parsed, Weather)


def test_responses_and_their_events(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=8)
    assert first.output_text
    with client.responses.stream(
        model=MODEL, input="And again.", previous_response_id=first.id, max_output_tokens=8
    ) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_embeddings_and_models(client: openai.OpenAI) -> None:
    vectors = client.embeddings.create(model=MODEL, input=["a cat", "a dog"]).data
    assert len(vectors[0].embedding) == len(vectors[1].embedding) > 8
    assert MODEL in [model.id for model in client.models.list()]  # another test may have pulled one more


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=100_000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="speech is not supported"):
        client.audio.speech.create(model=MODEL, voice="alloy", input="Hello")
