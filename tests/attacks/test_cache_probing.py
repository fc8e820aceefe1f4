"""Nobody learns from the prefix cache what another tenant has sent (S5)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.conftest import AttackedServer

_LENGTH = 120


@pytest.fixture
def secret() -> list[int]:
    """Long enough for many pages; never sent before."""
    chance = random.SystemRandom()  # the suite's own numbers are the same in every test
    return [chance.randrange(300, 30_000) for _ in range(_LENGTH)]


def _cached(server: AttackedServer, tenant: str, prompt: list[int], **fields: Any) -> int:
    with server.target(tenant).http() as http:
        answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **fields})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_s5_usage_does_not_tell_what_another_key_sent(served: AttackedServer, secret: list[int]) -> None:
    assert _cached(served, "good", secret) == 0
    assert _cached(served, "good", secret) > 0  # its own
    assert _cached(served, "evil", secret) == 0
    assert _cached(served, "evil", secret) > 0  # its own again, by now


def test_s5_a_stream_does_not_tell_either(served: AttackedServer, secret: list[int]) -> None:
    _cached(served, "good", secret)
    body = {"prompt": secret, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    with served.target().http() as http:
        lines = http.post("/v1/completions", json=body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    details = [event["usage"]["prompt_tokens_details"] for event in events if event.get("usage")]
    assert details
    assert all(each["cached_tokens"] == 0 for each in details)
    assert not any(each.get("loaded_tokens") for each in details)


def test_s5_a_request_may_have_a_salt_of_its_own(served: AttackedServer, secret: list[int]) -> None:
    assert _cached(served, "good", secret, cache_salt="alice") == 0
    assert _cached(served, "good", secret, cache_salt="bob") == 0
    assert _cached(served, "good", secret, cache_salt="alice") > 0
    assert _cached(served, "evil", secret, cache_salt="alice") == 0  # a salt names nothing outside its key


def test_s5_a_tier_is_as_private_as_memory(tiny_chat: Path, tmp_path: Path, secret: list[int]) -> None:
    """The server starts anew: the first tenant's pages are on disk, for the first tenant only."""
    flags = ("--kv-disk", str(tmp_path / "kv"))
    first = AttackedServer(tiny_chat, tmp_path / "keys.json", *flags)
    try:
        _cached(first, "good", secret)
    finally:
        first.stop()
    second = AttackedServer(tiny_chat, tmp_path / "keys.json", *flags)
    try:
        assert _cached(second, "evil", secret) == 0
        assert _cached(second, "good", secret) > 0
    finally:
        second.stop()
