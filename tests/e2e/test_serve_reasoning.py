"""Reasoning through every chat API of a real server, on a random model: the template begins it, the budget ends it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.serving import RunningServer, serving
from tests.e2e.word_model import make_word_model

_OPEN, _CLOSE = 7, 8
_TEMPLATE = (
    "{% for message in messages %}{{ message.content }} {% endfor %}<think>"
    "{% if enable_thinking is defined and not enable_thinking %} </think>{% endif %}"
)
_BUDGET, _LENGTH = 6, 20
_EXTRA: dict[str, Any] = {"ignore_eos": True, "logit_bias": {str(_CLOSE): -100, str(_OPEN): -100}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = make_word_model(tmp_path_factory.mktemp("reasoning"), _TEMPLATE, {_OPEN: "<think>", _CLOSE: "</think>"})
    with serving(folder, "--served-model-name", "tiny", "--context", "128", "--max-num-seqs", "4") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def _chat(client: openai.OpenAI, budget: int | None = _BUDGET, **extra: Any) -> Any:
    fields = extra.pop("fields", {})
    body = {**_EXTRA, **({"thinking_token_budget": budget} if budget is not None else {}), **extra}
    messages: Any = [{"role": "user", "content": "hello there"}]
    return client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=_LENGTH, extra_body=body, **fields
    )


def test_the_budget_ends_the_reasoning_and_the_answer_follows(client: openai.OpenAI, server: RunningServer) -> None:
    answer = _chat(client)
    message = answer.choices[0].message
    assert len(message.reasoning_content.split()) == _BUDGET
    assert len(message.content.split()) == _LENGTH - _BUDGET - 1
    assert answer.usage.completion_tokens_details.reasoning_tokens == _BUDGET + 1
    assert "think" not in message.content + message.reasoning_content
    unbounded = _chat(client, None)
    assert not unbounded.choices[0].message.content
    assert unbounded.usage.completion_tokens_details.reasoning_tokens == _LENGTH
    assert "qwen3 (from the chat template)" in server.log


def test_streamed_is_whole(client: openai.OpenAI) -> None:
    whole = _chat(client).choices[0].message
    chunks = list(_chat(client, fields={"stream": True, "stream_options": {"include_usage": True}}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == whole.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == _BUDGET + 1


def test_it_can_be_switched_off_or_left_out(client: openai.OpenAI) -> None:
    for extra in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        message = _chat(client, **extra).choices[0].message
        assert getattr(message, "reasoning_content", None) is None
        assert len(message.content.split()) == _LENGTH
    hidden = _chat(client, include_reasoning=False).choices[0].message
    assert getattr(hidden, "reasoning_content", None) is None
    assert hidden.content == _chat(client).choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_responses_have_an_item_of_it(client: openai.OpenAI, stream: bool) -> None:
    body = {**_EXTRA, "thinking_token_budget": _BUDGET}
    answer: Any = client.responses.create(model="tiny", input="hello there", temperature=0, max_output_tokens=_LENGTH,
                                          stream=stream, extra_body=body)  # fmt: skip
    if stream:
        events = list(answer)
        answer = events[-1].response
        said = "".join(each.delta for each in events if each.type == "response.reasoning_text.delta")
        assert said == answer.output[0].content[0].text
    chat = _chat(client).choices[0].message
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == chat.reasoning_content
    assert answer.output_text == chat.content
    assert answer.usage.output_tokens_details.reasoning_tokens == _BUDGET + 1


def test_the_other_apis_have_it_too(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hello there"}]
    thinking = {"type": "enabled", "budget_tokens": 3}
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "thinking": thinking}
    blocks = server.http.post("/v1/messages", json=body).json()["content"]
    assert blocks[0]["type"] == "thinking"
    assert len(blocks[0]["thinking"].split()) <= 3
    events = server.http.post("/v1/messages", json={**body, "stream": True}).text
    assert "thinking_delta" in events
    wanted = {"messages": messages, "stream": False, "think": True, "options": {"temperature": 0, "num_predict": 5}}
    assert server.http.post("/api/chat", json=wanted).json()["message"]["thinking"]
    lines = server.http.post("/api/generate", json={**wanted, "prompt": "hello", "stream": True}).text
    assert '"thinking"' in lines
