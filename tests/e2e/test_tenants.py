"""Several keys on one server: what they cannot learn of each other, what they may ask for, and keys that change."""

from __future__ import annotations

import hashlib
import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import RunningServer, serving, wait_until

_FLAGS = ("--context", "256", "--concurrency", "4", "--served-model-name", "stories")
_KEYS = [
    {"key": "alice-key", "name": "alice", "max_pinned_share": 0.05},
    {"key_sha256": hashlib.sha256(b"bob-key").hexdigest(), "name": "bob", "max_priority": -10, "max_sequences": 4},
    {"key": "team1-key", "name": "team1", "cache": "team"},
    {"key": "team2-key", "name": "team2", "cache": "team"},
    {"key": "ops-key", "name": "ops", "metrics": True},
]


class Tenants:
    def __init__(self, server: RunningServer, keys: Path) -> None:
        self.server = server
        self.keys = keys

    def post(self, name: str, prompt: list[int], **body: Any) -> httpx.Response:
        headers = {"x-api-key": f"{name}-key"}
        body = {"max_tokens": 2, "ignore_eos": True, "temperature": 0, **body}
        return self.server.http.post("/v1/completions", json={"prompt": prompt, **body}, headers=headers)

    def cached(self, name: str, prompt: list[int], **body: Any) -> int:
        answer = self.post(name, prompt, **body)
        assert answer.status_code == 200, answer.text
        details = answer.json()["usage"]["prompt_tokens_details"]
        assert (details["cached_tokens"] == 0) == (details["cache_reason"] == "cold")
        return int(details["cached_tokens"])

    def refusal(self, name: str, prompt: list[int], **body: Any) -> tuple[int, str]:
        answer = self.post(name, prompt, **body)
        return answer.status_code, answer.json()["error"]["code"]

    def write(self, entries: list[dict[str, Any]]) -> None:
        self.keys.write_text(json.dumps({"keys": entries}))


@pytest.fixture(scope="module")
def tenants(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    keys.write_text(json.dumps({"keys": _KEYS}))
    with serving(model_path("stories15m"), *_FLAGS, "--api-keys-file", str(keys)) as server:
        yield Tenants(server, keys)


def test_a_key_finds_only_its_own_prompts_in_the_cache(tenants: Tenants) -> None:
    prompt = list(range(1000, 1065))
    assert tenants.cached("alice", prompt) == 0
    assert tenants.cached("alice", prompt) == 64
    assert tenants.cached("bob", prompt) == 0
    assert tenants.cached("bob", prompt) == 64


def test_keys_of_a_group_share_their_cache(tenants: Tenants) -> None:
    prompt = list(range(2000, 2065))
    assert tenants.cached("team1", prompt) == 0
    assert tenants.cached("team2", prompt) == 64
    assert tenants.cached("alice", prompt) == 0


def test_a_salt_divides_the_cache_of_a_key_and_opens_no_other(tenants: Tenants) -> None:
    prompt = list(range(3000, 3065))
    assert tenants.cached("alice", prompt, cache_salt="user 1") == 0
    assert tenants.cached("alice", prompt, cache_salt="user 1") == 64
    assert tenants.cached("alice", prompt, cache_salt="user 2") == 0
    assert tenants.cached("alice", prompt) == 0
    assert tenants.cached("bob", prompt, cache_salt="user 1") == 0
    assert tenants.post("alice", prompt, cache_salt="x" * 257).status_code == 400


def test_priority_has_a_limit(tenants: Tenants) -> None:
    assert tenants.refusal("alice", [1, 2, 3], priority=-1) == (400, "priority_limit")
    assert tenants.post("alice", [1, 2, 3], priority=5).status_code == 200
    assert tenants.post("bob", [1, 2, 3], priority=-10).status_code == 200
    assert tenants.refusal("bob", [1, 2, 3], priority=-11) == (400, "priority_limit")


def test_sequences_have_a_limit(tenants: Tenants) -> None:
    assert tenants.refusal("bob", [1, 2, 3], n=5) == (400, "sequence_limit")
    assert tenants.post("bob", [1, 2, 3], n=4).status_code == 200


def test_pins_have_a_quota(tenants: Tenants) -> None:
    pages = tenants.server.http.get("/load", headers={"x-api-key": "ops-key"}).json()["kv_pages_total"]
    allowed = int(0.05 * pages)

    def pin(start: int) -> str:
        prompt = list(range(start, start + 161))  # ten pages
        answer = tenants.post("alice", prompt, cache_control={"type": "pin"}).json()
        return str(answer["usage"]["prompt_tokens_details"].get("cache_control", "granted"))

    outcomes = [pin(4000 + 200 * number) for number in range(allowed // 10 + 1)]
    assert set(outcomes[:-1]) <= {"granted"}
    assert outcomes[-1] == "over_quota"


def test_numbers_of_all_keys_need_a_right(tenants: Tenants) -> None:
    for path in ("/metrics", "/load"):
        assert tenants.server.http.get(path, headers={"x-api-key": "alice-key"}).status_code == 403
        assert tenants.server.http.get(path, headers={"x-api-key": "ops-key"}).status_code == 200


def test_keys_change_without_a_restart(tenants: Tenants) -> None:
    """Last in this file: the keys are others afterwards."""
    ended: list[httpx.Response] = []
    body = {"max_tokens": 200, "n": 16}  # four at a time: it lasts
    running = threading.Thread(target=lambda: ended.append(tenants.post("team1", [5, 6, 7], **body)))
    running.start()
    ops = {"x-api-key": "ops-key"}
    wait_until(lambda: tenants.server.http.get("/load", headers=ops).json()["requests_running"] > 0, 20)
    others = [entry for entry in _KEYS if entry["name"] not in ("team1", "alice")]
    tenants.write([*others, {"key": "alice-key", "name": "alice", "max_parallel": 1, "requests_per_minute": 1}])
    tenants.server.process.send_signal(signal.SIGHUP)
    running.join(20)
    assert ended[0].status_code == 401
    assert tenants.post("team1", [1]).status_code == 401
    assert tenants.post("bob", [1, 2]).status_code == 200
    assert tenants.post("alice", [1, 2]).status_code == 200
    assert tenants.refusal("alice", [1, 2]) == (429, "request_quota")
    tenants.keys.write_text('{"keys": [{"key": "half-writ')
    tenants.server.logged("were not reloaded")
    assert tenants.post("bob", [1, 2]).status_code == 200
    assert "half-writ" not in tenants.server.log
    tenants.write([{"key": "carol-key", "name": "carol"}])  # without a signal
    wait_until(lambda: tenants.post("carol", [1, 2]).status_code == 200, 20)
    assert tenants.post("bob", [1, 2]).status_code in (401, 429)  # wrong keys of one address are slowed down
