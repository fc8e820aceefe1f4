"""The outermost layer: request ids, Host and Origin, keys, body limits, the access log, security headers. Plain ASGI,
before any route or parser runs.

Every path needs a key when keys are set, unknown paths and documentation included; but for the probes (/livez, /readyz,
/health, /ping), unless they ask about one model, and the files of the page at /. The log is one JSON line per exchange
and never holds prompt text or keys. Knows no route's meaning.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.log import get_logger
from tokenmill.serve.api.exchange import Record, error_response
from tokenmill.serve.api.page import OPEN_PAGES, basic_key, challenge
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.errors import ApiError
from tokenmill.serve.metrics import Metrics
from tokenmill.serve.tenants.keys import Client, KeyRing
from tokenmill.serve.transport.connections import address_group
from tokenmill.serve.transport.http_protocol import CONNECTION_KEY
from tokenmill.serve.transport.key_guessing import DELAY, WrongKeys
from tokenmill.serve.transport.listening import is_loopback
from tokenmill.serve.transport.refusals import Refusals
from tokenmill.serve.transport.site import SiteCheck

_access = get_logger("access")
_OPEN_PATHS = ("/livez", "/readyz", "/health", "/ping")
_MAX_ID = 128
IGNORED_HEADER = "x-tokenmill-ignored"
# Pages have a policy of their own: page.py.
_POLICY = b"default-src 'none'; frame-ancestors 'none'"
_SECURITY_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))


class Edge:
    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        metrics: Metrics,
        config: ServeConfig,
        body_limit: Callable[[str], int] | None = None,
    ) -> None:
        """`body_limit`: by path, unless it is that of `config`."""
        self._app = app
        self._body_limit = body_limit or config.body_limit
        self._keys = keys
        self._metrics = metrics
        self._config = config
        local = keys.open and not config.uds and is_loopback(config.host)
        self._site = SiteCheck(local, config.allowed_host, config.cors_origin)
        self._wrong_keys = WrongKeys(config.wrong_key_limit)
        self._refusals = Refusals(0 if keys.open else config.refusal_limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        began = time.monotonic()
        client = self._keys.find(_key(headers))
        record = Record(_request_id(headers), client or Client("unknown"), stranger=client is None)
        scope.setdefault("state", {})["record"] = record
        status = [0]
        watched = self._watch(send, record, status, headers)
        try:
            refusal = self._refusal(scope, headers, client)
            if refusal is not None:
                if refusal.code == "too_many_wrong_keys":
                    await asyncio.sleep(DELAY)
                record.error = refusal.message
                await error_response(refusal)(scope, receive, watched)
            else:
                if client is not None and CONNECTION_KEY in scope["state"]:
                    scope["state"][CONNECTION_KEY].trust()
                await self._app(scope, self._bounded(receive, self._body_limit(scope["path"])), watched)
        finally:
            (record.metrics or self._metrics).add("http_responses", 1.0, str(status[0] or 499))
            if self._config.access_log:
                _access.info(_line(scope, record, status[0] or 499, time.monotonic() - began))

    def _refusal(self, scope: Scope, headers: Headers, client: Client | None) -> ApiError | None:
        path = route_path(scope["path"], self._config.root_path)
        is_probe = path in _OPEN_PATHS
        wrong_site = None if is_probe else self._site.refusal(scope["method"], headers)
        if wrong_site is not None:
            return wrong_site
        is_open = not _names_model(scope) if is_probe else path in OPEN_PAGES and scope["method"] in ("GET", "HEAD")
        if client is None and not is_open:
            return self._wrong_key(scope, headers)
        length = headers.get("content-length", "0")
        limit = self._body_limit(scope["path"])
        if length.isdecimal() and int(length) > limit:
            return ApiError(413, f"the body has {length} bytes, the limit of this server is {limit}")
        return None

    def _wrong_key(self, scope: Scope, headers: Headers) -> ApiError:
        peer = scope.get("client")
        wait = 0.0
        if _key(headers) is not None:
            wait = self._wrong_keys.record(address_group(peer[0]) if peer else "", time.monotonic())
        if wait:
            return ApiError(429, "too many wrong API keys", code="too_many_wrong_keys", retry_after=wait)
        return ApiError(401, "the API key is missing or unknown", code="invalid_api_key")

    def _watch(self, send: Send, record: Record, status: list[int], asked: Headers) -> Send:
        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
                if 400 <= status[0] < 500:
                    delay = self._refusals.record(record.client.name, time.monotonic())
                    if delay:
                        await asyncio.sleep(delay)
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.request_id
                headers.raw.extend(_SECURITY_HEADERS)
                if "content-security-policy" not in headers:
                    headers.raw.append((b"content-security-policy", _POLICY))
                if status[0] == 401:
                    headers["www-authenticate"] = challenge(asked)
                if record.ignored:
                    headers[IGNORED_HEADER] = ",".join(record.ignored)
            await send(message)

        return watched

    def _bounded(self, receive: Receive, limit: int) -> Receive:
        """A body sent in chunks is cut off where it becomes too long."""
        taken = 0

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > limit:
                raise HTTPException(413, f"the body has more than {limit} bytes")
            return message

        return bounded


def route_path(path: str, root_path: str) -> str:
    """The path without the prefix under which a proxy publishes the API, whether or not the proxy removed it."""
    prefix = root_path.rstrip("/")
    return path.removeprefix(prefix) if prefix and path.startswith(f"{prefix}/") else path


def _names_model(scope: Scope) -> bool:
    """Whether a probe is about one model: which ones there are is not for strangers."""
    return "model" in parse_qs(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)


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
