"""Sends each request to the application of its model, and keeps that model loaded until the answer has left.

Only the `model` of a JSON body is looked at; what has none, and every request of a server with one model, goes to the
first. A request whose model must be loaded waits here, with its body read. Plain ASGI between the edge and the routes;
fleet/routing.py knows the names.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from tokenmill.serve.api.caller import deadline_of
from tokenmill.serve.api.error_shapes import shaped_error
from tokenmill.serve.api.exchange import ClientGoneError, json_response, record_of, unless_gone
from tokenmill.serve.api.reading import is_json
from tokenmill.serve.errors import ApiError
from tokenmill.serve.fleet.fleet import Fleet
from tokenmill.serve.fleet.host import Host
from tokenmill.serve.keep_alive import parse_keep_alive
from tokenmill.serve.tenants.keys import Client

MODEL_HEADER = "x-tokenmill-model"
# Answered by the first application, whatever their body says.
_OWN_PATHS = (
    *("/v1/files", "/v1/batches", "/sleep", "/wake_up"),
    *("/api/pull", "/api/show", "/api/delete", "/api/create", "/api/copy", "/api/push"),
)
_PROBES = ("/livez", "/readyz", "/health", "/ping")
_OLLAMA = {"/api/generate": "prompt", "/api/chat": "messages"}  # path -> what an empty one leaves out
_KEPT_ALIVE = (*_OLLAMA, "/api/embed", "/api/embeddings")
_ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_MAX_PEEKED = 4096  # bytes of a value that is looked at
_NULL = msgspec.Raw(b"null")
_EMPTY = (b"null", b'""', b"[]")


class _Peek(msgspec.Struct):
    """What of a body decides where it goes. Nothing is made of the values: the structure of the body was not counted
    yet (api/reading.py)."""

    model: msgspec.Raw = _NULL
    keep_alive: msgspec.Raw = _NULL
    prompt: msgspec.Raw = _NULL
    messages: msgspec.Raw = _NULL
    base_model_name: msgspec.Raw = _NULL
    lora_name: msgspec.Raw = _NULL

    def text(self, name: str) -> str | None:
        """A value that is a text, and not too long for a name."""
        value = getattr(self, name)
        try:
            return msgspec.json.decode(value, type=str) if len(value) <= _MAX_PEEKED else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def leaves_out(self, name: str) -> bool:
        value = getattr(self, name)
        return len(value) <= _MAX_PEEKED and bytes(value).translate(None, b" \t\r\n") in _EMPTY


_peek = msgspec.json.Decoder(_Peek).decode


class Front:
    def __init__(self, fleet: Fleet, root_path: str) -> None:
        self._fleet = fleet
        self._prefix = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._fleet.default.app
        assert app is not None, "the first model is loaded before the port is open"
        if scope["type"] != "http" or not self._concerns_a_model(scope):
            await app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            await self._dispatch(request, send)
        except ClientGoneError:
            record_of(request).error = "the client left"
            await send({"type": "http.response.start", "status": 499, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        except HTTPException as problem:  # of the edge: the body is too long
            await self._refuse(request, ApiError(problem.status_code, str(problem.detail)), send)
        except ApiError as error:
            await self._refuse(request, error, send)

    async def _refuse(self, request: Request, error: ApiError, send: Send) -> None:
        record, default = record_of(request), self._fleet.default.service
        record.error = error.message
        if default is not None and error.status < 500 and error.status != 429:
            default.charge(record.client)  # as every refusal
        await shaped_error(error, self._path(request.scope))(request.scope, request.receive, send)

    def _concerns_a_model(self, scope: Scope) -> bool:
        path = self._path(scope)
        return scope["method"] == "POST" and not path.startswith((*_OWN_PATHS, *_PROBES)) and not _by_id(path)

    def _path(self, scope: Scope) -> str:
        path: str = scope["path"]
        return path.removeprefix(self._prefix) if self._prefix and path.startswith(f"{self._prefix}/") else path

    async def _dispatch(self, request: Request, send: Send) -> None:
        path, record, fleet = self._path(request.scope), record_of(request), self._fleet
        several, receive = len(fleet.hosts) > 1, request.receive
        looked_at: _Peek | None = None
        num_bytes = 0
        if several or path in _KEPT_ALIVE or not fleet.default.usable:
            default = fleet.default.service
            assert default is not None
            default.check_client(record.client, queue=not several)  # before a body is read, as everywhere
            body = await _read(request)
            num_bytes, receive = len(body), _replayed(body, request.receive)
            looked_at = _look(body) if is_json(request) else None
            del body
        host, name = self._find(path, looked_at, record.client)
        if num_bytes > host.body_limit(path):
            raise ApiError(413, f"the body has {num_bytes} bytes, the limit of this model is {host.body_limit(path)}")
        if path in _KEPT_ALIVE and looked_at is not None:
            keep_alive = _keep_alive(looked_at.keep_alive) if record.client.operates else None
            if path in _OLLAMA and looked_at.leaves_out(_OLLAMA[path]):
                await self._move(request, host, keep_alive, name or host.name, send)
                return
            host.keep_alive = host.keep_alive if keep_alive is None else keep_alive
        looked_at = None  # it holds the whole body, which nobody needs once it is read
        async with AsyncExitStack() as stack:
            entering = stack.enter_async_context(fleet.lease(host, deadline_of(request), record.client, num_bytes))
            await (entering if host.usable else unless_gone(request, entering))
            assert host.app is not None
            record.metrics = host.metrics
            await host.app(request.scope, receive, _naming(send, host.name) if several else send)

    def _find(self, path: str, looked_at: _Peek | None, client: Client) -> tuple[Host, str | None]:
        """The model and the name it was asked by. With one model its application looks at the name, unless the request
        never comes there or the key may not use every model."""
        name = self._asked_for(path, looked_at) if looked_at is not None else None
        loads = path in _OLLAMA and looked_at is not None and looked_at.leaves_out(_OLLAMA[path])
        looks = loads or client.models or len(self._fleet.hosts) > 1
        return self._fleet.find(name, client) if looks else self._fleet.default, name

    def _asked_for(self, path: str, looked_at: _Peek) -> str | None:
        name = looked_at.text("model")
        if path not in _ADAPTERS or name is not None:
            return name
        adapter = looked_at.text("lora_name")  # one that is there is changed where it is
        there = any(adapter in host.adapter_names for host in self._fleet.hosts.values())
        return looked_at.text("base_model_name") or (adapter if there else None)

    async def _move(self, request: Request, host: Host, keep_alive: float | None, name: str, send: Send) -> None:
        """Ollama's way to load or unload a model: a request that asks for nothing."""
        began = time.monotonic()
        if not record_of(request).client.operates:
            raise ApiError(403, "this key may not load or unload models", code="operator_right")
        if keep_alive == 0:
            await unless_gone(request, self._fleet.sleep(host, level=2))
        else:
            await unless_gone(request, self._fleet.load(host, keep_alive))
        empty: dict[str, Any] = {"response": ""}
        if self._path(request.scope) == "/api/chat":
            empty = {"message": {"role": "assistant", "content": ""}}
        answer = {
            "model": name,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **empty,
            "done": True,
            "done_reason": "unload" if keep_alive == 0 else "load",
            "total_duration": int((time.monotonic() - began) * 1e9),
        }
        await json_response(answer)(request.scope, request.receive, send)


def _by_id(path: str) -> bool:
    """Whether a stored response is meant: all applications share them."""
    return path.startswith("/v1/responses/")


async def _read(request: Request) -> bytes:
    pieces: list[bytes] = []
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


def _replayed(body: bytes, receive: Receive) -> Receive:
    left = [body]

    async def replayed() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return replayed


def _look(body: bytes) -> _Peek | None:
    """What cannot be read is the application's to refuse."""
    try:
        return _peek(body)
    except (ValueError, RecursionError):
        return None


def _keep_alive(value: msgspec.Raw) -> float | None:
    if len(value) == len(_NULL) and bytes(value) == bytes(_NULL):
        return None
    try:
        return parse_keep_alive(msgspec.json.decode(value, type=str | float))
    except (msgspec.DecodeError, UnicodeDecodeError):
        problem = "keep_alive is no duration: write it like 5m, 90s, 0 or -1"
        raise ApiError(400, problem, param="keep_alive") from None
    except ValueError as error:
        raise ApiError(400, str(error), param="keep_alive") from None


def _naming(send: Send, model: str) -> Send:
    """Answers of a server with several models say which of them it was: a split does not tell."""

    async def naming(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[MODEL_HEADER] = model.encode("ascii", "replace").decode()
        await send(message)

    return naming
