"""llama-index, by its class for servers that are like OpenAI's: completion, chat, streams, tools."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import MODEL

like = pytest.importorskip("llama_index.llms.openai_like", reason="make test-clients installs it")


@pytest.fixture
def llm(v1: str) -> Any:
    return like.OpenAILike(
        model=MODEL,
        api_base=v1,
        api_key="none",
        context_window=2048,
        max_tokens=64,
        temperature=0.0,
        is_chat_model=True,
        is_function_calling_model=True,
        strict=True,
        max_retries=0,
        timeout=60,
    )


def test_complete_and_chat_whole_and_streamed(llm: Any) -> None:
    from llama_index.core.llms import ChatMessage

    assert llm.complete("Name three colours.").text
    messages = [ChatMessage(role="user", content="Name three colours.")]
    whole = llm.chat(messages).message.content
    *_, last = llm.stream_chat(messages)
    assert whole == last.message.content
    plain = llm.model_copy(update={"is_chat_model": False})
    assert plain.complete("Once upon a time").text


def test_tools(llm: Any) -> None:
    from llama_index.core.tools import FunctionTool

    def set_light(on: bool) -> str:
        """Switch the light on or off."""
        return f"on: {on}"

    tool = FunctionTool.from_defaults(set_light)
    answer = llm.chat_with_tools([tool], user_msg="Switch the light on.", tool_required=True)
    (call, *_) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "set_light"
    assert call.tool_kwargs["on"] in (True, False)
