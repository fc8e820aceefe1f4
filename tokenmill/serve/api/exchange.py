"""One HTTP exchange: JSON and event-stream answers that notice when the client leaves.

A stream is written as fast as the client reads; what came meanwhile goes out in one piece. A client that leaves ends
its generation within a step. Knows ASGI, not what the bytes mean; used by all generating routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.serve.errors import ApiError
from tokenmill.serve.generation import Generation
from tokenmill.serve.metrics import Metrics
from tokenmill.serve.tenants.keys import Client

_Result = TypeVar("_Result")
DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"  # clients skip it
EVENT_STREAM = "text/event-stream; charset=utf-8"
NDJSON = "application/x-ndjson"

to_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Record:
    """What is known of an exchange, for the access log and the response headers."""

    request_id: str
    client: Client
    stranger: bool = False  # without a key, where one is needed for anything but probes and the page
    ignored: tuple[str, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None
    background: bool = False  # a row of a batch: in the batch lane, after all others
    metrics: Metrics | None = None  # of the model that answers; None: of the first
    began: float = field(default_factory=time.monotonic)


class ClientGoneError(Exception):
    """The client closed the connection before the answer."""


def record_of(request: Request) -> Record:
    record: Record = request.scope["state"]["record"]
    return record


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), status, dict(headers or {}), "application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers())


def event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`; if the client leaves first, `work` is cancelled and ClientGoneError is raised."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_until_gone(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        await _end(working, leaving)


class StreamedResponse(Response):
    """Sends chunks as they come; `close` is called at the end, whatever the reason."""

    def __init__(self, chunks: AsyncIterator[bytes], media_type: str, close: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = [
            (b"content-type", media_type.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # proxies must not buffer the stream
        ]
        self._chunks = chunks
        self._close = close

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._close()
            await _end(sending, leaving)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def respond(
    request: Request,
    generation: Generation,
    *,
    complete: Callable[[], Awaitable[Any]],
    chunks: Callable[[], AsyncIterator[bytes]],
    media_type: str = EVENT_STREAM,
    ping: Callable[[], bytes] = lambda: COMMENT,
) -> Response:
    """Answer at once or as a stream, as the generation was opened, and close it at the end.

    A stream starts with its first token, so that an error before it is an HTTP status. If that takes longer than the
    ping interval, the stream starts with pings, which keep proxies from closing it; errors are then events.
    """
    try:
        if not generation.streaming:
            await unless_gone(request, generation.result())
            return json_response(await complete())
        seconds: float | None = request.app.state.ping_seconds or None
        if await unless_gone(request, generation.first(seconds)):
            stream = chunks()
        else:
            stream = _after_pings(generation, seconds, ping, chunks)
        return StreamedResponse(stream, media_type, generation.close)
    except BaseException:
        generation.close()
        raise
    finally:
        if not generation.streaming:
            generation.close()


async def _after_pings(
    generation: Generation,
    seconds: float | None,
    ping: Callable[[], bytes],
    chunks: Callable[[], AsyncIterator[bytes]],
) -> AsyncIterator[bytes]:
    with contextlib.suppress(ApiError):  # `chunks` meets the same error, and shows it in its own form
        yield ping()
        while not await generation.first(seconds):
            yield ping()
    async for chunk in chunks():
        yield chunk


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
