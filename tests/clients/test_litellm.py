"""litellm, through the names by which it knows such servers: OpenAI, vLLM, Ollama and Anthropic."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.clients.conftest import CITIES, MODEL
from tests.clients.test_openai import MESSAGES, TOOL
from tests.e2e.serving import RunningServer

litellm = pytest.importorskip("litellm", reason="make test-clients installs it")


@pytest.fixture(params=["openai", "hosted_vllm", "ollama_chat", "anthropic"])
def target(request: pytest.FixtureRequest, server: RunningServer) -> dict[str, Any]:
    suffix = "" if request.param in ("ollama_chat", "anthropic") else "/v1"
    return {
        "model": f"{request.param}/{MODEL}",
        "api_base": server.url + suffix,
        "api_key": "none",
        "messages": MESSAGES,
        "temperature": 0,
        "timeout": 60,
        "num_retries": 0,
    }


def test_completion_whole_and_streamed(target: dict[str, Any]) -> None:
    whole = litellm.completion(**target, max_tokens=12)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens == 12
    parts = litellm.completion(**target, max_tokens=12, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content


def test_tools(target: dict[str, Any]) -> None:
    if target["model"].startswith("ollama_chat"):
        pytest.skip("Ollama's API has no way to force a call")
    # It changes the tools it is given; for vLLM it drops additionalProperties, so that the model may add some.
    fields = {"tools": [copy.deepcopy(TOOL)], "tool_choice": "required", "max_tokens": 64}
    call = litellm.completion(**target, **fields).choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert any(f'"city": "{city}"' in call.function.arguments for city in CITIES)


def test_embedding(v1: str) -> None:
    answer = litellm.embedding(model=f"openai/{MODEL}", input=["a cat"], api_base=v1, api_key="none")
    assert len(answer.data[0]["embedding"]) > 8


def test_errors_are_the_clients_own(v1: str) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/other", api_base=v1, api_key="none", messages=MESSAGES, num_retries=0)
    messages = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(model=f"openai/{MODEL}", api_base=v1, api_key="none", messages=messages, num_retries=0)
