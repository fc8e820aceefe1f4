"""One HTTP exchange in pieces that travel between Ray actors: a call there, lists of ASGI messages back.

Plain values only, so that a replica of another version can read them during a rolling upgrade.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from tokenmill.log import get_logger

_log = get_logger(__name__)
_LEAVE_SECONDS = 5.0  # for the application to notice that the client has left
Call = dict[str, Any]


def call_of(scope: Scope, body: bytes) -> Call:
    return {
        "method": scope["method"],
        "path": scope["path"],
        "root_path": scope.get("root_path", ""),
        "query": scope.get("query_string", b""),
        "headers": [tuple(each) for each in scope["headers"]],
        "client": tuple(scope["client"]) if scope.get("client") else None,
        "body": body,
    }


async def answered(app: ASGIApp, call: Call) -> AsyncIterator[list[Message]]:
    """Messages of the answer, all that are there at a time. Closing the iterator is a client that leaves."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    left = asyncio.Event()
    bodies = [call["body"]]

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(_scope(call), receive, messages.put)
        except Exception as error:  # starlette raises an internal error again after it has answered 500
            _log.error("%s failed: %s", call["path"], error)
        finally:
            messages.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        ended = False
        while not ended:
            found = [await messages.get()]
            while not messages.empty():
                found.append(messages.get_nowait())
            ended = found[-1] is None
            pieces = [message for message in found if message is not None]
            if pieces:
                yield pieces
    finally:
        left.set()
        await asyncio.wait((running,), timeout=_LEAVE_SECONDS)
        running.cancel()


def _scope(call: Call) -> Scope:
    path: str = call["path"]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call["method"],
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": call["root_path"],
        "query_string": call["query"],
        "headers": call["headers"],
        "client": call["client"],
        "server": None,
        "state": {},
    }
