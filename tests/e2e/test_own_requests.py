"""What a key learns about its own requests: where the time went, where the cached prefix ended; and `doctor --url`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import RunningServer, serving
from tokenmill.bench.symptoms.job import examine

_KEYS = """
keys:
  - {key: key-of-anna, name: anna}
  - {key: key-of-ben, name: ben}
  - {key: key-of-monitoring, name: monitoring, metrics: true}
"""
_STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her dog."


@pytest.fixture(scope="module")
def server(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(_KEYS)
    flags = ("--context", "256", "--concurrency", "4", "--batch-tokens", "16", "--api-keys-file", str(keys))
    with serving(model_path("stories15m"), *flags) as running:
        yield running


def _as(server: RunningServer, name: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"authorization": f"Bearer key-of-{name}"}, timeout=60)


def _complete(http: httpx.Client, prompt: str, **fields: Any) -> httpx.Response:
    answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return answer


def _kept(http: httpx.Client, request_id: str) -> dict[str, Any]:
    """The record of a request. It is whole once its connection has ended, a moment after the last byte."""
    deadline = time.monotonic() + 20
    while True:
        found: dict[str, Any] = http.get(f"/v1/requests/{request_id}").json()
        if found["timeline"] is not None or time.monotonic() > deadline:
            return found


def test_a_request_has_its_timeline(server: RunningServer) -> None:
    with _as(server, "anna") as http:
        line = _complete(http, _STORY, return_timeline=True).json()["timeline"]
        (prompt,) = line["prompts"]
        chunks = prompt["prefill"]["chunks"]
        assert prompt["prefill"]["num_chunks"] == len(chunks) > 1  # a step takes 16 tokens
        assert sum(chunk["tokens"] for chunk in chunks) == prompt["prompt_tokens"] - prompt["cached_tokens"]
        parts = ("read", "tokenize", "admit")
        total = sum(line[part]["seconds"] for part in parts)
        total += sum(prompt[part]["seconds"] for part in ("queue", "prefill", "decode"))
        assert 0 < total <= line["seconds"] + 1e-4
        assert prompt["finish_reasons"] == ["length"]
        assert prompt["first_token_at"] == pytest.approx(prompt["decode"]["at"])
        answer = _complete(http, _STORY, stream=True, return_timeline=True)
        events = [json.loads(each[6:]) for each in answer.text.split("\n\n") if each.startswith("data: {")]
        assert events[-1]["choices"] == []
        assert events[-1]["timeline"]["prompts"][0]["output_tokens"] == 4
        kept = _kept(http, answer.headers["x-request-id"])
        assert kept["timeline"]["prompts"][0]["output_tokens"] == 4


def test_where_the_prefix_broke_is_told_to_its_key_alone(server: RunningServer) -> None:
    changed = _STORY.replace("the park", "a forest")
    with _as(server, "ben") as http:
        first = _complete(http, _STORY, return_prefix_break=True)
        assert "no recent prompt" in first.json()["prefix_breaks"][0]["explanation"]
        second = _complete(http, changed, return_prefix_break=True)
        (found,) = second.json()["prefix_breaks"]
        assert found["compared_with"] == first.headers["x-request-id"]
        assert found["text_before"].endswith("outside in")
        assert found["text_then"].lstrip().startswith("the park")
        assert found["text_now"].lstrip().startswith("a forest")
        assert found["cached_tokens"] == found["reusable_tokens"] > 0
        details = second.json()["usage"]["prompt_tokens_details"]
        assert found["reason"] == details["cache_reason"]
        ids = [each["id"] for each in http.get("/v1/requests").json()["data"]]
        assert ids[:2] == [second.headers["x-request-id"], first.headers["x-request-id"]]
        shown = http.get(f"/v1/requests/{ids[0]}").json()
        assert shown["prefix_breaks"] == [found]
    with _as(server, "anna") as other:
        assert other.get(f"/v1/requests/{ids[0]}").status_code == 404
        assert not {each["id"] for each in other.get("/v1/requests").json()["data"]} & set(ids)
    assert httpx.get(f"{server.url}/v1/requests").status_code == 401


def test_a_server_is_examined_by_its_metrics(server: RunningServer) -> None:
    with _as(server, "anna") as http:
        _complete(http, _STORY)
    result = examine(server.url, "key-of-monitoring", seconds=0)
    assert (result["server"], result["reading"]["engine_up"]) == ("tokenmill", 1.0)
    assert result["reading"]["running_limit"] == 4.0
    assert result["reading"]["queue_seconds"] > 0
    assert result["reading"]["host_memory_share"] > 0
    assert result["verdict"] in ("healthy", "needs attention", "in trouble")


def test_nothing_is_kept_where_the_option_says_so(model_path: Callable[[str], Path]) -> None:
    with serving(model_path("stories15m"), "--context", "128", "--max-recent-requests", "0") as server:
        assert server.http.get("/v1/requests").status_code == 404
        body = {"prompt": "Once", "max_tokens": 2, "return_prefix_break": True}
        refused = server.http.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_prefix_break")
        del body["return_prefix_break"]
        timed = server.http.post("/v1/completions", json={**body, "return_timeline": True}).json()
        assert timed["timeline"]["prompts"]
