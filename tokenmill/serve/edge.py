"""The outermost layer: request ids, keys, body limits, the access log. Plain ASGI, before any route or parser runs.

Every path but the probes (/livez, /readyz, /health, /ping) needs a key when keys are set, unknown paths and
documentation included. The log is one JSON line per exchange and never holds prompt text or keys. Knows no route's
meaning.
"""

from __future__ import annotations

import json
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.log import get_logger
from tokenmill.serve.errors import ApiError
from tokenmill.serve.exchange import Record, error_response
from tokenmill.serve.keys import Client, KeyRing
from tokenmill.serve.metrics import Metrics
from tokenmill.serve.page import CHALLENGE, basic_key

_access = get_logger("access")
_OPEN_PATHS = ("/livez", "/readyz", "/health", "/ping")
_MAX_ID = 128
IGNORED_HEADER = "x-tokenmill-ignored"


class Edge:
    def __init__(self, app: ASGIApp, keys: KeyRing, metrics: Metrics, max_body_bytes: int, access_log: bool) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        began = time.monotonic()
        client = self._keys.find(_key(headers))
        record = Record(_request_id(headers), client or Client("unknown"))
        scope.setdefault("state", {})["record"] = record
        status = [0]
        watched = self._watch(send, record, status)
        try:
            refusal = self._refusal(scope["path"], headers, client)
            if refusal is not None:
                record.error = refusal.message
                await error_response(refusal)(scope, receive, watched)
            else:
                await self._app(scope, self._bounded(receive), watched)
        finally:
            self._metrics.add("http_responses", 1.0, str(status[0] or 499))
            if self._access_log:
                _access.info(_line(scope, record, status[0] or 499, time.monotonic() - began))

    def _refusal(self, path: str, headers: Headers, client: Client | None) -> ApiError | None:
        if client is None and path not in _OPEN_PATHS:
            return ApiError(401, "the API key is missing or unknown", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            return ApiError(413, f"the body has {length} bytes, the limit of this server is {self._max_body_bytes}")
        return None

    def _watch(self, send: Send, record: Record, status: list[int]) -> Send:
        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.request_id
                if status[0] == 401:
                    headers["www-authenticate"] = CHALLENGE
                if record.ignored:
                    headers[IGNORED_HEADER] = ",".join(record.ignored)
            await send(message)

        return watched

    def _bounded(self, receive: Receive) -> Receive:
        """A body sent in chunks is cut off where it becomes too long."""
        taken = 0

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_body_bytes:
                raise HTTPException(413, f"the body has more than {self._max_body_bytes} bytes")
            return message

        return bounded


def with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """Let web pages of these origins call the API; outside the key check, because preflight requests carry none."""
    from starlette.middleware.cors import CORSMiddleware

    exposed = ("x-request-id", IGNORED_HEADER)
    return CORSMiddleware(app, origins, allow_methods=("*",), allow_headers=("*",), expose_headers=exposed)


def _key(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key:
        return key.strip()
    return (basic_key(headers) if scheme.lower() == "basic" else None) or headers.get("x-api-key")


def _request_id(headers: Headers) -> str:
    client_id = headers.get("x-request-id", "")
    if 0 < len(client_id) <= _MAX_ID and client_id.isascii() and client_id.isprintable():
        return client_id
    return uuid.uuid4().hex


def _line(scope: Scope, record: Record, status: int, seconds: float) -> str:
    peer = scope.get("client")
    fields = {
        "time": round(time.time(), 3),
        "request_id": record.request_id,
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 4),
        "client": peer[0] if peer else None,
        "key": record.client.name or None,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "ignored": list(record.ignored) or None,
        "error": record.error,
    }
    return json.dumps({name: value for name, value in fields.items() if value is not None})
