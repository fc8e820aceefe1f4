"""What clients see when a replica fails at a chosen moment: replicas that follow a script, the real ingress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

ingress = pytest.importorskip("tokenmill.ray.ingress", reason="ray is not installed: `make test-ray` runs these")
from ray.exceptions import ActorDiedError  # noqa: E402

START = {"type": "http.response.start", "status": 200, "headers": []}
BUSY = {**START, "status": 503}
MORE = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
LAST = {"type": "http.response.body", "body": b"data: 2\n\n", "more_body": False}
DIES = "dies"


class Pieces:
    def __init__(self, script: list[Any]) -> None:
        self._script, self.cancelled = script, False

    async def __aiter__(self) -> AsyncIterator[list[dict[str, Any]]]:
        for each in self._script:
            if each == DIES:
                raise ActorDiedError
            if each == "waits":
                await asyncio.Event().wait()
            yield [each]

    def cancel(self) -> None:
        self.cancelled = True


class Replicas:
    """A deployment handle: each call is answered by the next script."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.given = [Pieces(script) for script in scripts]
        self.calls: list[dict[str, Any]] = []

    def options(self, **_: Any) -> Replicas:
        return self

    def remote(self, call: dict[str, Any]) -> Pieces:
        self.calls.append(call)
        return self.given[len(self.calls) - 1]


async def _ask(replicas: Replicas, body: bytes, path: str, leave: bool) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    if leave:
        parts.append({"type": "http.disconnect"})

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.Event().wait()
        return parts.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"a", b"b")], "client": ("::1", 5)}
    await ingress.Ingress(replicas, 100)(scope, receive, send)
    return sent


def ask(replicas: Replicas, body: bytes = b"x", path: str = "/v1/completions", leave: bool = False) -> list[Any]:
    return asyncio.run(_ask(replicas, body, path, leave))


@pytest.mark.parametrize("first", [[DIES], [START, DIES], [BUSY, LAST], [BUSY, MORE, DIES], []])
def test_what_has_not_begun_is_asked_again(first: list[Any]) -> None:
    replicas = Replicas(first, [START, MORE, LAST])
    assert ask(replicas) == [START, MORE, LAST]
    assert replicas.calls[0] == replicas.calls[1]
    assert replicas.calls[0]["body"] == b"x"


@pytest.mark.parametrize("ending", [[DIES], []])
def test_a_stream_that_has_begun_ends_with_an_error(ending: list[Any]) -> None:
    replicas = Replicas([START, MORE, *ending])
    *begun, last = ask(replicas)
    assert begun == [START, MORE]
    assert last["body"].startswith(b'data: {"error"')
    assert not last["more_body"]
    assert len(replicas.calls) == 1


def test_a_refusal_is_the_replicas_own() -> None:
    refusal = {**START, "status": 429}
    assert ask(Replicas([refusal, LAST])) == [refusal, LAST]


def test_a_probe_tells_what_is() -> None:
    replicas = Replicas([BUSY, LAST])
    assert ask(replicas, path="/readyz") == [BUSY, LAST]
    assert len(replicas.calls) == 1


def test_it_gives_up_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "_FIRST_WAIT", 0.0)
    start, body = ask(Replicas(*[[DIES]] * 8))
    assert start["status"] == 503
    assert b"no replica could answer" in body["body"]


def test_a_client_that_leaves_is_followed() -> None:
    replicas = Replicas([START, MORE, "waits"])
    ask(replicas, leave=True)
    assert not replicas.calls or replicas.given[0].cancelled


def test_a_body_has_a_limit() -> None:
    replicas = Replicas([START, LAST])
    start, _ = ask(replicas, body=bytes(101))
    assert start["status"] == 413
    assert not replicas.calls
