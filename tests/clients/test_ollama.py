"""The official client of Ollama: chat, generate, streams, tools, JSON, the list of models, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.conftest import CITIES, MODEL
from tests.e2e.serving import RunningServer

ollama = pytest.importorskip("ollama", reason="make test-clients installs it")

_MESSAGES: Any = [{"role": "user", "content": "Why is the sky blue?"}]
_OPTIONS = {"temperature": 0, "num_predict": 12, "seed": 1}
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
}


@pytest.fixture
def client(server: RunningServer) -> Any:
    return ollama.Client(host=server.url)


def test_chat_whole_and_streamed(client: Any) -> None:
    whole = client.chat(model=MODEL, messages=_MESSAGES, options=_OPTIONS)
    assert whole.message.content
    assert (whole.done, whole.eval_count) == (True, 12)
    assert whole.eval_duration > 0
    assert whole.prompt_eval_duration > 0
    parts = list(client.chat(model=MODEL, messages=_MESSAGES, options=_OPTIONS, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content


def test_generate_whole_streamed_and_raw(client: Any) -> None:
    whole = client.generate(model=MODEL, prompt="Why is the sky blue?", options=_OPTIONS)
    parts = list(client.generate(model=MODEL, prompt="Why is the sky blue?", options=_OPTIONS, stream=True))
    assert "".join(part.response for part in parts) == whole.response
    assert client.generate(model=MODEL, prompt="Once upon a time", raw=True, options=_OPTIONS).response


def test_json_of_a_schema(client: Any) -> None:
    answer = client.chat(model=MODEL, messages=_MESSAGES, format=_SCHEMA, options={**_OPTIONS, "num_predict": 48})
    assert json.loads(answer.message.content)["city"] in CITIES


def test_functions_are_offered_as_tools(client: Any) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
          a: the first
          b: the second
        """
        return a + b

    answer = client.chat(model=MODEL, messages=_MESSAGES, tools=[add], options=_OPTIONS)
    assert answer.message.content or answer.message.tool_calls


def test_the_model_is_listed(client: Any) -> None:
    assert client.list().models[0].model == MODEL  # others may have been pulled since


def test_errors_are_the_clients_own(client: Any) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(model="other", messages=_MESSAGES)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="mirostat"):
        client.chat(model=MODEL, messages=_MESSAGES, options={"mirostat": 1})
