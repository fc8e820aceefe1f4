"""langchain-openai: chat, streams, tools, structured output, embeddings."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import CITIES, MODEL
from tests.clients.test_openai import TOOL, Weather

langchain_openai = pytest.importorskip("langchain_openai", reason="make test-clients installs it")


@pytest.fixture
def chat(v1: str) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=v1, api_key="none", model=MODEL, temperature=0, max_tokens=48, max_retries=0, timeout=60
    )


def test_invoke_and_stream(chat: Any) -> None:
    whole = chat.invoke("Name three colours.")
    assert whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(part.content for part in chat.stream("Name three colours.")) == whole.content


def test_tools(chat: Any) -> None:
    answer = chat.bind_tools([TOOL], tool_choice="any").invoke("What is the weather in Oslo?")
    assert answer.tool_calls[0]["name"] == "get_weather"
    assert answer.tool_calls[0]["args"]["city"] in CITIES


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: Any, method: str) -> None:
    answer = chat.with_structured_output(Weather, method=method).invoke("What is the weather in Oslo?")
    assert isinstance(answer, Weather)


def test_embeddings(v1: str) -> None:
    embeddings = langchain_openai.OpenAIEmbeddings(
        base_url=v1, api_key="none", model=MODEL, check_embedding_ctx_length=False
    )
    one, other = embeddings.embed_documents(["a cat", "a dog"])
    assert len(one) == len(other) > 8
