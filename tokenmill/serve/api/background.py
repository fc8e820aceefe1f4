"""Requests that no connection carries: the application is called in this process, for a client that is known.

They take the way of every HTTP request (validation, quotas, admission, error shapes), but not the edge: there is no key
to check and no socket. They run in the batch lane at the lowest priority (caller.py). Batches and `run-batch` use it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from tokenmill.serve.api.exchange import Record
from tokenmill.serve.batches.answering import Answer
from tokenmill.serve.tenants.keys import Client


class _Error(msgspec.Struct):
    code: Any = None


class _ErrorBody(msgspec.Struct):
    error: _Error | None = None


class BackgroundCalls:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, client: Client, path: str, body: bytes, request_id: str) -> Answer:
        sent: list[Message] = []
        bodies = [body]

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await asyncio.Event().wait()  # nobody leaves
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        with contextlib.suppress(Exception):  # starlette raises an internal error again after it has answered 500
            await self._app(_scope(path, Record(request_id, client, background=True)), receive, send)
        return _answer(sent)


def _scope(path: str, record: Record) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": {"record": record},
    }


def _answer(sent: list[Message]) -> Answer:
    if not sent:
        return Answer(500, b'{"error":{"message":"internal error","type":"internal_error","param":null,"code":500}}')
    status: int = sent[0]["status"]
    body = b"".join(message.get("body", b"") for message in sent[1:])
    if status == 200:
        return Answer(status, body)
    headers = dict(sent[0]["headers"])
    error = None
    with contextlib.suppress(ValueError):
        error = msgspec.json.decode(body, type=_ErrorBody).error
    code = error.code if error is not None and isinstance(error.code, str) else None
    return Answer(status, body, code, float(headers[b"retry-after"]) if b"retry-after" in headers else None)
