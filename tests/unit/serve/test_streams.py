"""A stream that waits for its first token is kept alive by pings; errors before them are an HTTP status, after them an
event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response

from tests.unit.serve.live_server import live, until
from tokenmill.serve.api.exchange import COMMENT, error_response, event, respond
from tokenmill.serve.errors import ApiError
from tokenmill.serve.generation import Delta, Generation

_GET = b"GET /stream HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_DELTA = Delta(0, 0, "hello", [1], [], None)


class _Stream:
    """One generation behind a route, moved by the test instead of an engine."""

    def __init__(self, ping_seconds: float, ping: bytes = COMMENT) -> None:
        self.closed = False
        self.generation = Generation(True, self._close)
        self.generation._unfinished = 1
        self.app = FastAPI()
        self.app.state.ping_seconds = ping_seconds

        @self.app.get("/stream")
        async def stream(request: Request) -> Response:
            try:
                return await respond(request, self.generation, complete=dict, chunks=self._chunks, ping=lambda: ping)
            except ApiError as error:
                return error_response(error)

    def _close(self, _generation: Generation) -> None:
        self.closed = True

    async def _chunks(self) -> AsyncIterator[bytes]:
        try:
            async for batch in self.generation.deltas():
                yield b"".join(event(delta.text) for delta in batch)
        except ApiError as error:
            yield event(error.body())

    def finish(self) -> None:
        self.generation.post(_DELTA)
        self.generation.member_finished()

    def fail(self) -> None:
        self.generation.fail(ApiError(503, "the engine is gone"))


def _follow(stream: _Stream, awaited: bytes, then: Callable[[], None]) -> bytes:
    """All that the client gets; `then` happens once `awaited` has come, or at once if that is empty."""

    async def ask() -> bytes:
        async with live(stream.app) as server:
            client = await server.connect(_GET)
            begun = b""
            if awaited:
                begun = await client.until(awaited)
            else:
                await until(lambda: stream.generation._waiter is not None)
            then()
            got = begun + await client.rest()
            await until(lambda: stream.closed)
            return got

    return asyncio.run(ask())


def test_a_first_token_in_time_needs_no_ping() -> None:
    stream = _Stream(60)
    got = _follow(stream, b"", stream.finish)
    assert got.startswith(b"HTTP/1.1 200")
    assert b'"hello"' in got
    assert COMMENT not in got


def test_an_error_within_the_first_interval_is_a_status() -> None:
    stream = _Stream(60)
    got = _follow(stream, b"", stream.fail)
    assert got.startswith(b"HTTP/1.1 503")


@pytest.mark.parametrize("ping", [COMMENT, b'event: ping\ndata: {"type":"ping"}\n\n', b'{"done":false}\n'])
def test_a_stream_that_waits_is_pinged_in_its_own_form(ping: bytes) -> None:
    stream = _Stream(0.01, ping)
    got = _follow(stream, ping + b"\r\n", stream.finish)
    assert got.startswith(b"HTTP/1.1 200")
    assert got.index(ping) < got.index(b'"hello"')
    assert ping not in got[got.index(b'"hello"') :]


def test_an_error_after_a_ping_is_an_event() -> None:
    stream = _Stream(0.01)
    got = _follow(stream, COMMENT, stream.fail)
    assert got.startswith(b"HTTP/1.1 200")
    assert b"the engine is gone" in got


def test_no_pings_where_they_are_off() -> None:
    async def ask() -> bool:
        stream = _Stream(0)
        return await asyncio.wait_for(_first(stream), 10)

    async def _first(stream: _Stream) -> bool:
        asyncio.get_running_loop().call_soon(stream.finish)
        return await stream.generation.first(None)

    assert asyncio.run(ask())


def test_a_client_that_leaves_while_pinged_ends_its_generation() -> None:
    stream = _Stream(0.01)

    async def ask() -> None:
        async with live(stream.app) as server:
            client = await server.connect(_GET)
            await client.until(COMMENT)
            client.close()
            await until(lambda: stream.closed)

    asyncio.run(ask())


def test_the_pings_of_the_adapters_are_what_their_clients_skip() -> None:
    from tokenmill.serve.api.anthropic import _event
    from tokenmill.serve.api.ollama import _head

    assert _event("ping") == b'event: ping\ndata: {"type":"ping"}\n\n'
    head: dict[str, Any] = _head("m")
    assert set(head) == {"model", "created_at"}
