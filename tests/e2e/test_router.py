"""The router in front of real servers: cached prompts are found, a killed replica breaks no stream."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.routing import RunningRouter, routing
from tests.e2e.serving import RunningServer, serving, wait_until

_TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}Once"
_FLAGS = ("--context", "256", "--concurrency", "16", "--served-model-name", "stories", "--chat-template", _TEMPLATE)
_TEXT = "One day a small dog went to the park with a red ball. "


@pytest.fixture(scope="module")
def servers(model_path: Callable[[str], Path]) -> Iterator[list[RunningServer]]:
    path = model_path("stories15m")
    with serving(path, *_FLAGS) as first, serving(path, *_FLAGS) as second:
        yield [first, second]


@pytest.fixture(scope="module")
def router(servers: list[RunningServer]) -> Iterator[RunningRouter]:
    with routing([each.url for each in servers]) as running:
        running.wait_up(True, True)
        wait_until(lambda: all(each["root"] for each in running.replicas()), 30)
        yield running


def _bodies(number: int, tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests of every kind that can be resumed."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    for each in range(number):
        prompt = f"Once upon a time there were {each} little birds who"
        body = {"max_tokens": tokens, "ignore_eos": True, "stream": True, "return_token_ids": True, "temperature": 0}
        if each % 4 == 1:
            body |= {"temperature": 0.9, "seed": each}
        if each % 4 == 2:
            body |= {"guided_json": schema, "temperature": 0.8, "seed": each, "ignore_eos": False}
        if each % 4 == 3:
            yield "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}
        else:
            yield "/v1/completions", {**body, "prompt": prompt}


def _said(text: str) -> tuple[str, list[int], str | None, set[str]]:
    said, ids, reason, heads = "", list[int](), None, set[str]()
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    for chunk in map(json.loads, lines[:-1]):
        assert "error" not in chunk, chunk
        heads.add(chunk["id"])
        for choice in chunk["choices"]:
            said += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            ids += choice.get("token_ids") or []
            reason = choice["finish_reason"] or reason
    return said, ids, reason, heads


async def _ask_all(
    url: str, requests: list[tuple[str, dict[str, Any]]], after: int = 0, harm: Callable[[], None] | None = None
) -> list[str]:
    """All at once; `harm` happens when `after` of them have tokens."""
    begun: set[int] = set()

    async def ask(number: int, path: str, body: dict[str, Any]) -> str:
        text = ""
        async with http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for piece in answer.aiter_text():
                text += piece
                begun.add(number)
                if harm is not None and len(begun) == after and number in begun:
                    _once(harm)
        return text

    done: list[bool] = []

    def _once(act: Callable[[], None]) -> None:
        if not done:
            done.append(True)
            act()

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        return await asyncio.gather(*(ask(n, path, body) for n, (path, body) in enumerate(requests)))


def test_a_prompt_goes_where_its_beginning_is_cached(router: RunningRouter) -> None:
    def asked(text: str) -> int:
        answer = router.http.post("/v1/completions", json={"prompt": text, "max_tokens": 1, "temperature": 0})
        assert answer.status_code == 200
        found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    for number in range(6):  # whoever gets it first gets what follows
        text = f"Story {number}. " + _TEXT * 3
        asked(text)
        assert asked(text + "Then he") >= 32
        messages = [{"role": "user", "content": text}]
        chat = {"messages": messages, "max_tokens": 1, "temperature": 0}
        router.http.post("/v1/chat/completions", json=chat)
        longer = {**chat, "messages": [*messages, {"role": "user", "content": "And then?"}]}
        answer = router.http.post("/v1/chat/completions", json=longer).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    assert router.metric("unread_prompts_total") == 0
    assert router.metric("matched_tokens_total") > 0


def test_what_the_router_expects_is_what_replicas_have(router: RunningRouter, servers: list[RunningServer]) -> None:
    """The index equals the trees, once nothing is under way."""

    def names(server: RunningServer) -> int:
        return len(server.http.get("/v1/replica/events").json()["snapshot"])

    wait_until(lambda: [each["pages"] for each in router.replicas()] == [names(server) for server in servers], 20)
    assert all(each["outstanding"] == each["waiting_tokens"] == 0 for each in router.replicas())


def test_other_paths_reach_a_replica_and_some_do_not(router: RunningRouter) -> None:
    assert router.http.get("/v1/models").json()["data"][0]["id"] == "stories"
    assert router.http.post("/tokenize", json={"prompt": "Once"}).status_code == 200
    assert router.http.get("/readyz").json()["replicas"] == 2
    assert router.http.get("/v1/files").status_code == 501
    assert router.http.get("/v1/replica/events").status_code == 501
    answer = router.http.post("/v1/completions", json={"prompt": "Once", "model": "another"})
    assert answer.status_code == 404


def test_token_ids_are_shown_only_to_those_who_ask(router: RunningRouter) -> None:
    body = {"prompt": "Once upon", "max_tokens": 8, "stream": True, "temperature": 0}
    assert "token_ids" not in router.http.post("/v1/completions", json=body).text
    assert "token_ids" in router.http.post("/v1/completions", json={**body, "return_token_ids": True}).text


def test_a_drained_replica_gets_nothing(router: RunningRouter, servers: list[RunningServer]) -> None:
    assert router.http.post("/router/drain", params={"replica": servers[0].url}).json()["draining"]
    before = servers[0].http.get("/v1/replica/events").json()["load"]["query_tokens"]
    for number in range(6):
        router.http.post("/v1/completions", json={"prompt": f"{number} birds", "max_tokens": 1})
    assert servers[0].http.get("/v1/replica/events").json()["load"]["query_tokens"] == before
    assert not router.http.post("/router/undrain", params={"replica": "0"}).json()["draining"]
    assert router.http.post("/router/drain", params={"replica": "http://nobody"}).status_code == 404


def test_tenants_keep_their_own_caches(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    """The router finds the pages of a key without knowing keys or secrets, and those of another key never."""
    names = {"keys": [{"name": name, "key": f"{name}-key", "admin": name == "boss"} for name in ("boss", "a", "b")]}
    (tmp_path / "keys.json").write_text(json.dumps(names))
    flags = (*_FLAGS, "--api-keys-file", str(tmp_path / "keys.json"))
    with (
        serving(model_path("stories15m"), *flags) as server,
        routing([server.url], "--replica-key", "boss-key") as router,
    ):
        router.wait_up(True)
        wait_until(lambda: all(each["root"] for each in router.replicas()), 30)

        def matched(key: str) -> float:
            before = router.metric("matched_tokens_total")
            body = {"prompt": _TEXT * 4, "max_tokens": 1}
            answer = router.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == (200 if key.endswith("-key") else 401)
            return router.metric("matched_tokens_total") - before

        assert matched("a-key") == 0
        assert matched("a-key") >= 32
        assert matched("b-key") == 0
        assert matched("nobody") == 0


@pytest.mark.parametrize("number", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_no_stream_ends_with_a_killed_replica(model_path: Callable[[str], Path], number: int) -> None:
    """Greedy, seeded, grammars and chats: all go on with the tokens that an unbroken run gives."""
    # A few answers are long, so that none has ended when the replica dies, however late this process is woken.
    path, requests = model_path("stories15m"), list(_bodies(number, 220 if number < 20 else 60))
    with (
        serving(path, *_FLAGS) as first,
        serving(path, *_FLAGS) as second,
        routing([first.url, second.url]) as router,
    ):
        router.wait_up(True, True)
        unbroken = [_said(text)[:3] for text in asyncio.run(_ask_all(second.url, requests))]
        kill = lambda: os.killpg(first.process.pid, signal.SIGKILL)  # noqa: E731
        answers = asyncio.run(_ask_all(router.url, requests, after=min(number, 10), harm=kill))
        broken = [_said(text) for text in answers]
        assert [each[:3] for each in broken] == unbroken
        assert all(len(heads) == 1 for *_, heads in broken)  # one id for one answer
        assert router.metric("resumed_total") > 0
        assert router.metric("broken_total") == 0
        wait_until(lambda: all(each["outstanding"] == 0 for each in router.replicas()), 20)
