"""The API of a real server on a real model, driven by the official openai client and, for the rest, by httpx."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.serving import RunningServer, serving
from tokenmill.kernels.cpu_module import multiplies_halves

_MODEL = "smollm2-test"
_MESSAGES: Any = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def server(model_path: Callable[[str], Path]) -> Iterator[RunningServer]:
    flags = ("--served-model-name", _MODEL, "--context", "512", "--max-num-seqs", "8", "--max-body-bytes", "256KiB")
    with serving(model_path("smollm2"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(autouse=True)
def _nothing_left_behind(server: RunningServer) -> Iterator[None]:
    yield
    server.wait_idle()


@pytest.fixture(scope="module", autouse=True)
def _cached_prompts(client: openai.OpenAI) -> None:
    """A prompt from the cache and one computed anew may differ in the last bits: have them all from the cache."""
    _chat(client)
    for prompt in ("Once upon a time", "The cat", "One two three"):
        _complete(client, prompt=prompt)


def _chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": _MODEL, "messages": _MESSAGES, "temperature": 0, "max_tokens": 12, **fields}
    )


def _complete(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(
        **{"model": _MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8, **fields}
    )


def test_models_tell_what_is_behind_the_name(client: openai.OpenAI, server: RunningServer) -> None:
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve(_MODEL).id == _MODEL
    behind = server.http.get("/v1/models").json()["data"][0]["tokenmill"]
    assert behind["quantization"] == "Q4_1"
    assert behind["kv_cache_dtype"] == ("float16" if multiplies_halves(64) else "float32")


def test_chat_streamed_is_chat_whole(client: openai.OpenAI) -> None:
    whole = _chat(client, max_tokens=40)
    stream = list(_chat(client, max_tokens=40, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert [chunk.choices[0].finish_reason for chunk in stream if chunk.choices][-1] == whole.choices[0].finish_reason
    assert stream[0].choices[0].delta.role == "assistant"
    usage = stream[-1].usage
    assert stream[-1].choices == []
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert all(chunk.usage is None for chunk in stream[:-1])


def test_a_second_time_the_prompt_is_cached(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "A fairly long question about cached prompts. " * 5}]
    first, second = (_chat(client, messages=messages).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens < second.prompt_tokens_details.cached_tokens
    assert second.prompt_tokens_details.cached_tokens <= second.prompt_tokens
    assert second.total_tokens == second.prompt_tokens + second.completion_tokens


def test_completions_of_many_prompts_keep_their_order(client: openai.OpenAI) -> None:
    single = [_complete(client, prompt=prompt).choices[0].text for prompt in ("The cat", "One two three")]
    both = _complete(client, prompt=["The cat", "One two three"])
    assert [choice.text for choice in both.choices] == single
    assert [choice.index for choice in both.choices] == [0, 1]
    streamed = ["", ""]
    for chunk in _complete(client, prompt=["The cat", "One two three"], stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == single


def test_token_ids_are_the_text_they_stand_for(client: openai.OpenAI, server: RunningServer) -> None:
    ids = server.http.post("/tokenize", json={"prompt": "The cat"}).json()["tokens"]
    text = _complete(client, prompt="The cat").choices[0].text
    assert _complete(client, prompt=ids).choices[0].text == text
    assert [choice.text for choice in _complete(client, prompt=[ids, ids]).choices] == [text, text]
    assert server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "The cat"


def test_tokenize_messages_counts_what_chat_counts(client: openai.OpenAI, server: RunningServer) -> None:
    count = server.http.post("/tokenize", json={"messages": _MESSAGES}).json()["count"]
    assert count == _chat(client).usage.prompt_tokens


def test_echo_and_completion_logprobs(client: openai.OpenAI) -> None:
    choice = _complete(client, echo=True, logprobs=2).choices[0]
    shown = choice.logprobs
    assert choice.text.startswith("Once upon a time")
    assert "".join(shown.tokens) == choice.text
    assert shown.token_logprobs[0] is None
    assert all(value <= 0 for value in shown.token_logprobs[1:])
    assert all(len(top) >= 2 for top in shown.top_logprobs[1:])
    assert shown.text_offset == [len("".join(shown.tokens[:number])) for number in range(len(shown.tokens))]
    scored = _complete(client, echo=True, max_tokens=0, logprobs=1).choices[0]
    assert scored.text == "Once upon a time"


def test_chat_logprobs_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = _chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    chunks = [
        chunk.choices[0].logprobs
        for chunk in _chat(client, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices
    ]
    streamed = [entry for logprobs in chunks if logprobs for entry in logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in whole], abs=1e-3)
    assert len(whole) == 12
    assert all(len(entry.top_logprobs) == 3 for entry in whole)
    # greedy: the token taken is the most likely one
    assert all(entry.token == entry.top_logprobs[0].token for entry in whole)
    assert bytes(whole[0].bytes).decode() == whole[0].token


def test_n_and_seed(client: openai.OpenAI) -> None:
    first, again = (_chat(client, n=3, seed=7, temperature=1.0).choices for _ in range(2))
    texts = [choice.message.content for choice in first]
    assert len(set(texts)) > 1
    assert texts == [choice.message.content for choice in again]
    streamed = ["", "", ""]
    for chunk in _chat(client, n=3, seed=7, temperature=1.0, stream=True):
        if chunk.choices:
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for make in (_chat, _complete):
        stream = list(make(client, max_tokens=6, stream=True, stream_options=options))
        counts = [chunk.usage.completion_tokens for chunk in stream]
        assert counts == sorted(counts)
        assert counts[-1] == 6
        assert all(chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
                   for chunk in stream)  # fmt: skip


def test_prompt_logprobs_of_a_chat(server: RunningServer) -> None:
    body = {"messages": _MESSAGES, "max_tokens": 1, "prompt_logprobs": 1}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    scores = answer["prompt_logprobs"]
    assert scores[0] is None
    assert len(scores) == answer["usage"]["prompt_tokens"]
    assert all(set(entry) == {"logprob", "rank", "decoded_token"} for entry in scores[1].values())
    for path in ("/v1/chat/completions", "/v1/completions"):
        refused = server.http.post(path, json={**body, "prompt": "x", "stream": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_stop_strings(client: openai.OpenAI) -> None:
    text = _complete(client, max_tokens=30).choices[0].text
    stop = text[10:14]
    cut = _complete(client, max_tokens=30, stop=[stop]).choices[0]
    assert cut.text == text[: text.index(stop)]
    assert cut.finish_reason == "stop"
    streamed = "".join(
        chunk.choices[0].text for chunk in _complete(client, max_tokens=30, stop=[stop], stream=True) if chunk.choices
    )
    assert streamed == cut.text


def test_logit_bias_forces_a_token(client: openai.OpenAI, server: RunningServer) -> None:
    (token,) = server.http.post("/tokenize", json={"prompt": " the", "add_special_tokens": False}).json()["tokens"]
    text = _complete(client, logit_bias={str(token): 100}, max_tokens=3).choices[0].text
    assert text == " the the the"


def test_both_names_of_the_output_limit(client: openai.OpenAI) -> None:
    assert _chat(client, max_tokens=3).usage.completion_tokens == 3
    assert _chat(client, max_tokens=openai.omit, max_completion_tokens=4).usage.completion_tokens == 4


def test_request_ids_and_ignored_fields(server: RunningServer) -> None:
    body = {"messages": _MESSAGES, "max_tokens": 1, "user": "me", "made_up": True}
    answer = server.http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    assert answer.headers["x-tokenmill-ignored"] == "user,made_up"
    assert len(server.http.get("/version").headers["x-request-id"]) >= 16
    server.logged('"request_id": "abc-1"')
    assert "Name three colours" not in server.log


@pytest.mark.parametrize(
    ("error", "fields", "param"),
    [
        (openai.NotFoundError, {"model": "gpt-9"}, "model"),
        (openai.BadRequestError, {"temperature": -1}, "temperature"),
        (openai.BadRequestError, {"n": 100}, "n"),
        (openai.BadRequestError, {"top_logprobs": 2}, "top_logprobs"),
        (openai.BadRequestError, {"logprobs": True, "top_logprobs": 21}, "logprobs"),
        (openai.BadRequestError, {"max_tokens": 4000}, "max_tokens"),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
        (openai.BadRequestError, {"messages": []}, "messages"),
        (openai.BadRequestError, {"messages": "hello"}, "messages"),
        (openai.BadRequestError, {"logit_bias": {"999999": 1}}, "messages"),
        (openai.BadRequestError, {"extra_body": {"priority": 1e9}}, "priority"),
        (openai.BadRequestError, {"extra_body": {"deadline_ms": -5}}, "deadline_ms"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_the_openai_shape(
    client: openai.OpenAI, error: type[openai.APIStatusError], fields: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(error) as caught:
        _chat(client, stream=stream, **fields)
    body: Any = caught.value.body
    assert body["param"] == param
    assert body["message"]
    assert body["type"]


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/v1/completions", b"{not json", 400),
        ("/v1/completions", b"", 400),
        ("/v1/completions", b'{"prompt": ""}', 400),
        ("/v1/completions", b'{"prompt": []}', 400),
        ("/v1/completions", b'{"prompt": "x", "suffix": "y"}', 400),
        ("/v1/completions", b'{"prompt": "x", "best_of": 99}', 400),
        ("/v1/completions", b'{"prompt": "\\ud800"}', 400),
        ("/v1/completions", b'{"prompt": [99999999]}', 400),
        ("/v1/completions", b'{"prompt": "x", "max_tokens": 0}', 400),
        ("/v1/completions", b"[" * 100_000, 400),
        ("/v1/completions", b'{"prompt": [' + b"1," * 80_000 + b'"x"]}', 400),
        ("/v1/completions", b'{"prompt": [' + b"1," * 600 + b"1]}", 400),
        ("/v1/completions", b'{"prompt": "' + b"x" * 200_000 + b'"}', 400),
        ("/v1/completions", b'{"prompt": "x", "temperature": NaN}', 400),
        ("/v1/completions", b'{"prompt": "x", "n": 1' + b"0" * 400 + b"}", 400),
        ("/v1/chat/completions", b'{"messages": [' + b"{}," * 60_000 + b"{}]}", 400),
        ("/v1/embeddings", b'{"input": "\xff"}', 400),
        ("/tokenize", b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
        ("/detokenize", b'{"tokens": [1, true]}', 400),
        ("/v1/completions", b'{"prompt": "' + b"x" * 300_000 + b'"}', 413),
        ("/v1/nothing", b"{}", 404),
        ("/health", b"{}", 405),
    ],
)
def test_bad_requests_never_hurt_the_server(server: RunningServer, path: str, content: bytes, status: int) -> None:
    answer = server.http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert server.http.get("/health").status_code == 200


def test_a_body_in_chunks_is_bounded_too(server: RunningServer) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(40):
            yield b"x" * 10_000
        yield b'"}'

    headers = {"content-type": "application/json"}
    assert server.http.post("/v1/completions", content=pieces(), headers=headers).status_code == 413


def test_embeddings(client: openai.OpenAI, server: RunningServer) -> None:
    texts = ["The cat sat on the mat.", "A cat was sitting on a mat.", "Interest rates rose by half a percent."]
    answer = client.embeddings.create(model=_MODEL, input=texts)  # this client asks for base64
    vectors = [each.embedding for each in answer.data]
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert all(sum(value * value for value in vector) == pytest.approx(1, abs=1e-3) for vector in vectors)
    alike, unlike = (sum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors[1:])
    assert alike > unlike
    plain = server.http.post("/v1/embeddings", json={"input": texts[0]}).json()
    assert plain["data"][0]["embedding"] == pytest.approx(vectors[0], abs=0.05)
    assert plain["usage"]["prompt_tokens"] == plain["usage"]["total_tokens"] > 0
    assert server.http.post("/v1/embeddings", json={"input": "x", "dimensions": 3}).status_code == 400


def test_ollama_style(server: RunningServer) -> None:
    tags = server.http.get("/api/tags").json()["models"]
    assert [model["name"] for model in tags] == [_MODEL]
    body = {"model": _MODEL, "messages": _MESSAGES, "options": {"temperature": 0, "num_predict": 10}}
    lines = [json.loads(line) for line in server.http.post("/api/chat", json=body).text.splitlines()]
    whole = server.http.post("/api/chat", json={**body, "stream": False}).json()
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert (lines[-1]["eval_count"], whole["eval_count"]) == (10, 10)
    generated = server.http.post(
        "/api/generate", json={"prompt": "The cat", "raw": True, "stream": False, "options": {"num_predict": 3}}
    )
    assert generated.json()["response"]
    assert server.http.post("/api/chat", json={"messages": [], "model": "x"}).json()["error"]
    ignored = server.http.post(
        "/api/chat", json={**body, "options": {"num_gpu": 1, "num_predict": 1}, "keep_alive": -1}
    )
    assert ignored.headers["x-tokenmill-ignored"] == "options.num_gpu"
    refused = server.http.post("/api/chat", json={**body, "options": {"num_ctx": 100_000}})
    assert (refused.status_code, "larger --context" in refused.json()["error"]) == (400, True)


def test_ollama_logprobs_are_those_of_chat(server: RunningServer) -> None:
    body = {"model": _MODEL, "messages": _MESSAGES, "logprobs": True, "top_logprobs": 2}
    options = {"options": {"temperature": 0, "num_predict": 6}}
    openai = server.http.post("/v1/chat/completions", json={**body, "temperature": 0, "max_tokens": 6}).json()
    wanted = openai["choices"][0]["logprobs"]["content"]
    lines = [json.loads(line) for line in server.http.post("/api/chat", json={**body, **options}).text.splitlines()]
    whole = server.http.post("/api/chat", json={**body, **options, "stream": False}).json()
    assert [each for line in lines for each in line.get("logprobs", ())] == whole["logprobs"] == wanted
    raw = {"prompt": "The cat", "raw": True, "stream": False, "logprobs": True, **options}
    scored = server.http.post("/api/generate", json=raw).json()["logprobs"]
    assert [len(each["top_logprobs"]) for each in scored] == [0] * 6
    assert "logprobs" not in server.http.post("/api/generate", json={**raw, "logprobs": False}).json()
    assert server.http.post("/api/chat", json={**body, "logprobs": False}).status_code == 400


def test_anthropic_style(server: RunningServer) -> None:
    body = {"model": _MODEL, "max_tokens": 10, "messages": _MESSAGES, "system": "Be brief.", "temperature": 0}
    server.http.post("/v1/messages", json=body)  # from now on the prompt is cached: the same arithmetic each time
    whole = server.http.post("/v1/messages", json=body).json()
    assert whole["content"][0]["text"]
    assert whole["stop_reason"] == "max_tokens"
    assert whole["usage"]["output_tokens"] == 10
    text = server.http.post("/v1/messages", json={**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events if event["type"] != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    streamed = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert streamed == whole["content"][0]["text"]
    refused = server.http.post("/v1/messages", json={**body, "model": "other"})
    assert refused.status_code == 404
    assert refused.json()["type"] == "error"


def test_metrics_count_what_happened(model_path: Callable[[str], Path]) -> None:
    flags = ("--served-model-name", _MODEL, "--context", "512", "--speculate", "off")  # drafted tokens arrive together
    with serving(model_path("smollm2"), *flags) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60)

        def read() -> dict[str, float]:
            families = text_string_to_metric_families(running.http.get("/metrics").text)
            return {sample.name: sample.value for family in families for sample in family.samples}

        before = read()
        _chat(client, max_tokens=5)
        after = read()
    for name, count in {
        "vllm:generation_tokens_total": 5,
        "tokenmill_ttft_seconds_count": 1,
        "vllm:inter_token_latency_seconds_count": 4,
    }.items():
        assert after[name] - before[name] == count
    assert after["tokenmill_engine_up"] == 1


def test_no_page_may_call_without_being_allowed(server: RunningServer) -> None:
    answer = server.http.get("/v1/models", headers={"Origin": "https://elsewhere.example"})
    assert "access-control-allow-origin" not in answer.headers
