"""What Ray's HTTP proxy talks to: passes requests to a replica, and to another one if that one dies first.

The answer begins when its first bytes are there. Until then a replica that dies, or whose engine is being replaced,
costs the client nothing but time: the request is asked again. A stream that has begun ends with an error event.
Requests are held in memory and state is not: any number of these may run.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
from ray import exceptions
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError
from starlette.types import Message, Receive, Scope, Send

from tokenmill.log import get_logger
from tokenmill.ray.calls import call_of

_log = get_logger(__name__)
_LOST = (  # what happened to the actor, not what it answered
    exceptions.RayActorError,
    exceptions.NodeDiedError,
    exceptions.ObjectLostError,
    exceptions.WorkerCrashedError,
    ReplicaUnavailableError,
    DeploymentUnavailableError,
)
_MAX_BODY = 64 << 20  # held here; a replica has its own, lower limit
_ATTEMPTS = 8
_FIRST_WAIT = 0.1
_MAX_WAIT = 5.0
_PROBES = ("/livez", "/readyz", "/health", "/ping")  # 503 is their answer


class _Unserved(Exception):
    """No byte of an answer has come; `messages`: what to say if nobody else does better."""

    def __init__(self, reason: str, messages: list[Message]) -> None:
        super().__init__(reason)
        self.messages = messages


class Ingress:
    """An ASGI application. `replicas`: a deployment handle whose method `answer` streams lists of messages."""

    def __init__(self, replicas: Any, max_body: int) -> None:
        """`max_body`: bytes; 0: as the context asks for, which only a replica knows."""
        self._answer = replicas.options(method_name="answer", stream=True)
        self._max_body = max_body or _MAX_BODY

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"there is nothing here for {scope['type']}")
        body = await _read(receive, self._max_body)
        if body is None:
            await _refuse(send, 413, "the body is longer than this server allows")
            return
        asking = asyncio.create_task(self._ask(scope, body, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                asking.result()
        finally:
            for task in (asking, leaving):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((asking, leaving))

    async def _ask(self, scope: Scope, body: bytes, send: Send) -> None:
        call, wait = call_of(scope, body), _FIRST_WAIT
        for left in reversed(range(_ATTEMPTS)):
            try:
                await self._ask_once(call, send)
                return
            except _Unserved as problem:
                if not left or scope["path"].endswith(_PROBES):
                    for message in problem.messages:
                        await send(message)
                    return
                _log.warning("%s is asked again: %s", scope["path"], problem)
            await asyncio.sleep(wait)
            wait = min(_MAX_WAIT, 2 * wait)

    async def _ask_once(self, call: dict[str, Any], send: Send) -> None:
        pieces = self._answer.remote(call)
        held: list[Message] = []  # the beginning, until there is something to say
        begun = ended = False
        try:
            async for piece in pieces:
                for message in piece:
                    held.append(message)
                    ended = ended or (message["type"] == "http.response.body" and not message.get("more_body"))
                if not begun and not (ended or any(message.get("body") for message in held)):
                    continue
                if not begun and held[0].get("status") == 503:
                    if not ended:
                        continue
                    raise _Unserved("the replica cannot serve it", held)
                begun = True
                for message in held:
                    await send(message)
                held = []
            reason = "" if ended else "it has failed"
        except _LOST as error:
            reason = f"it is gone ({type(error).__name__})"
        finally:
            if not ended:
                pieces.cancel()  # the client has left, or nobody is there to hear it
        if not begun:
            raise _Unserved(f"the replica did not answer: {reason}", _gone())
        if not ended:
            _log.error("a stream ends early, its replica did not end it: %s", reason)
            await send({"type": "http.response.body", "body": _event(), "more_body": False})


async def _read(receive: Receive, limit: int) -> bytes | None:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            return None
        if not message.get("more_body"):
            return b"".join(parts)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _live(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _error(status: int, text: str) -> bytes:
    kind = "service_unavailable" if status == 503 else "invalid_request_error"
    return msgspec.json.encode({"error": {"message": text, "type": kind, "param": None, "code": status}})


def _answer(status: int, text: str) -> list[Message]:
    headers = [(b"content-type", b"application/json")] + ([(b"retry-after", b"5")] if status == 503 else [])
    return [
        {"type": "http.response.start", "status": status, "headers": headers},
        {"type": "http.response.body", "body": _error(status, text), "more_body": False},
    ]


def _gone() -> list[Message]:
    return _answer(503, "no replica could answer; try again soon")


def _event() -> bytes:
    return b"data: " + _error(503, "the replica that computed this answer is gone") + b"\n\n"


async def _refuse(send: Send, status: int, text: str) -> None:
    for message in _answer(status, text):
        await send(message)
