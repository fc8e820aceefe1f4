"""Answers that began elsewhere, and what a replica tells a router: over HTTP, with a real engine."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import RunningServer, serving, wait_until
from tokenmill.checkpoint.tokenizer_files import load_tokenizer
from tokenmill.engine.kv.page_names import page_names

_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %} Once"
_SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
           "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
_BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 11, "top_p": 0.95},
    "penalties": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.4},
    "stop string": {"temperature": 0, "stop": ["the park and"], "max_tokens": 120},
    "log-probabilities": {"temperature": 0, "logprobs": 2},
    "grammar": {
        "temperature": 0.8,
        "seed": 5,
        "max_tokens": 90,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}},
    },
}


@pytest.fixture(scope="module")
def server(model_path: Callable[[str], Path]) -> Iterator[RunningServer]:
    flags = ("--context", "256", "--concurrency", "4", "--served-model-name", "stories", "--chat-template", _TEMPLATE)
    with serving(model_path("stories15m"), *flags) as running:
        yield running


def _stream(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    wanted = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}, **body}
    answer = server.http.post(path, json=wanted)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def _said(chunks: list[dict[str, Any]]) -> tuple[str, list[int], str | None]:
    text, ids, reason = "", list[int](), None
    for choice in (chunk["choices"][0] for chunk in chunks if chunk["choices"]):
        text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        ids += choice.get("token_ids") or []
        reason = choice["finish_reason"] or reason
    return text, ids, reason


@pytest.mark.parametrize("name", _BODIES)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_resumed_stream_goes_on_with_the_same_tokens(server: RunningServer, path: str, name: str) -> None:
    body = {"max_tokens": 40, **_BODIES[name]}
    if path == "/v1/completions":
        body["prompt"] = "Once upon a time there was"
    else:
        body["messages"] = [{"role": "user", "content": "There was a little girl."}]
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": 2}
    whole = _stream(server, path, body)
    text, ids, reason = _said(whole)
    for cut in (1, len(ids) // 2, len(ids) - 1):
        before, seen = 0, ""
        for chunk in whole:  # what a client has when the connection breaks after `cut` tokens
            if before < cut and chunk["choices"] and not chunk["choices"][0]["finish_reason"]:
                seen += _said([chunk])[0]
                before += len(chunk["choices"][0].get("token_ids") or [])
        rest = _stream(server, path, body | {"resume_token_ids": ids[:before]})
        assert _said(rest) == (text[len(seen) :], ids[before:], reason)
        assert rest[-1]["usage"]["completion_tokens"] == whole[-1]["usage"]["completion_tokens"]
        assert rest[-1]["usage"]["prompt_tokens"] == whole[-1]["usage"]["prompt_tokens"]
        assert not any("role" in choice.get("delta", {}) for chunk in rest for choice in chunk["choices"])


def test_a_complete_answer_holds_what_was_resumed(server: RunningServer) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    whole = server.http.post("/v1/completions", json=body).json()["choices"][0]
    rest = server.http.post("/v1/completions", json=body | {"resume_token_ids": whole["token_ids"][:5]}).json()
    assert rest["choices"][0] == whole


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n": 2}, "one answer"),
        ({"prompt": ["a", "b"]}, "one prompt"),
        ({"max_tokens": 2}, "has ended"),
        ({"resume_token_ids": [5, 10**6]}, "outside the vocabulary"),
        ({"resume_token_ids": [5, 2]}, "has ended"),  # 2: end of text
        ({"logprobs": 1}, "not known"),
    ],
)
def test_what_cannot_be_resumed_is_refused(server: RunningServer, changes: dict[str, Any], said: str) -> None:
    body = {"prompt": "Once", "max_tokens": 8, "resume_token_ids": [5, 6], **changes}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def _events(server: RunningServer, **query: Any) -> dict[str, Any]:
    answer = server.http.get("/v1/replica/events", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def test_events_name_the_pages_that_a_prompt_has(server: RunningServer, model_path: Callable[[str], Path]) -> None:
    first = _events(server)
    wait_until(lambda: bool(_events(server)["root"]), 20)
    root = server.http.get("/v1/replica/root").json()["root"]
    text = "A long prompt that fills more than one page of the cache, " * 6
    size = first["page_size"]
    ids = load_tokenizer(model_path("stories15m")).encode(text)
    names = page_names(base64.b64decode(root), ids, size)
    assert len(names) > 1
    before = _events(server)
    server.http.post("/v1/completions", json={"prompt": text, "max_tokens": 1, "temperature": 0})
    shown = [base64.b64encode(name).decode() for name in names]
    wait_until(lambda: _events(server)["sequence"] > before["sequence"], 20)
    after = _events(server, feed=before["feed"], after=before["sequence"], wait=5)
    stored = [tuple(each) for change in after["changes"] for each in change["stored"]]
    assert stored[: len(shown)] == list(zip(shown, [root, *shown[:-1]], strict=True))
    assert set(shown) <= {name for name, _ in _events(server, feed="another")["snapshot"]}
    assert _events(server, feed=after["feed"], after=10**6)["snapshot"]  # a reader from the future starts over
    assert after["load"]["slots"] == 4


def test_pages_of_another_salt_have_other_names(server: RunningServer) -> None:
    _events(server)
    plain, salted = (server.http.get("/v1/replica/root", params={"cache_salt": salt}).json() for salt in ("", "mine"))
    assert plain["root"] != salted["root"]
