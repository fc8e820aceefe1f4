"""The router as an ASGI application: its own few paths, and everything else to a replica.

Callers' headers go along, their keys too: the replicas know tenants, quotas and fairness. What is kept by one server
(files, batches, adapters, models to load) is refused here with the remedy. Plain ASGI; process.py serves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
import uuid
from typing import Any

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from tokenmill.errors import UserError
from tokenmill.route.answer import CallerAnswer
from tokenmill.route.config import RouteConfig
from tokenmill.route.fleet import Fleet
from tokenmill.route.metrics import RouterMetrics
from tokenmill.route.prompt import Prompt
from tokenmill.route.relay import Call, Relay
from tokenmill.route.texts import CHAT, COMPLETIONS, Texts
from tokenmill.serve.errors import ApiError
from tokenmill.serve.transport.http_protocol import CONNECTION_KEY
from tokenmill.serve.transport.listening import is_loopback
from tokenmill.serve.transport.site import SiteCheck

SESSION_HEADER = "x-session-id"
_PROBES = ("/livez", "/readyz", "/health", "/ping")
_OWN = ("/router/", "/metrics")
# What one server keeps, or does to itself.
_REFUSED = (
    *("/v1/files", "/v1/batches", "/v1/requests", "/v1/usage", "/v1/replica", "/v1/load_lora", "/v1/unload_lora"),
    *("/sleep", "/wake_up", "/load", "/api/pull", "/api/delete", "/api/create", "/api/copy", "/api/push"),
)
_HOP = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "proxy-connection", "content-length")
)
_DROPPED = _HOP | {"host", "accept-encoding", "expect"}
_KEYS = ("authorization", "x-api-key")
_CHARS_PER_TOKEN = 4  # of a prompt that cannot be tokenized here
_DEFAULT_OUTPUT = 128  # tokens of an answer whose length the body leaves open


class _GoneError(Exception):
    """The caller left before its body was here."""


class RouterApp:
    def __init__(self, config: RouteConfig, fleet: Fleet, texts: Texts, relay: Relay, metrics: RouterMetrics) -> None:
        self._config = config
        self._fleet = fleet
        self._texts = texts
        self._relay = relay
        self._metrics = metrics
        self._site = SiteCheck(is_loopback(config.host), config.allowed_host, ())
        self.draining = False
        self.num_in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        connection = scope.get("state", {}).get(CONNECTION_KEY)  # which is kept when there are too many
        answer = CallerAnswer(send, connection.trust if connection is not None else lambda: None)
        try:
            await self._answer(scope, receive, answer)
        except _GoneError:
            pass
        except ApiError as error:
            await answer.fail(error)
        except UserError as error:
            await answer.fail(ApiError(404, str(error)))
        finally:
            self._metrics.outcomes.labels(str(answer.status or 499)).inc()

    async def _answer(self, scope: Scope, receive: Receive, answer: CallerAnswer) -> None:
        path, headers = scope["path"], Headers(scope=scope)
        if path in _PROBES:
            await self._probe(path, answer)
            return
        refusal = self._site.refusal(scope["method"], headers)
        if refusal is not None:
            raise refusal
        if path.startswith(_OWN):
            self._check_admin(scope, headers)
            await self._own(scope, answer)
            return
        if path.startswith(_REFUSED):
            raise ApiError(501, f"{path} concerns one server: ask a replica itself", code="not_routed")
        if self.draining:
            raise ApiError(503, "the router is shutting down", code="draining", retry_after=5)
        self.num_in_flight += 1
        try:
            call = await self._call(scope, headers, receive)
            await _unless_gone(self._relay.run(call, answer), receive)
        finally:
            self.num_in_flight -= 1

    # --- what the router answers itself ---

    async def _probe(self, path: str, answer: CallerAnswer) -> None:
        num_usable = sum(each.usable for each in self._fleet.replicas)
        if path != "/livez" and (self.draining or not num_usable):
            why = "the router is shutting down" if self.draining else "no replica takes requests now"
            raise ApiError(503, why, code="draining" if self.draining else "no_replica")
        await _json(answer, {"status": "ok", "replicas": num_usable})

    def _check_admin(self, scope: Scope, headers: Headers) -> None:
        key = self._config.admin_key
        if key:
            given = headers.get("authorization", "").removeprefix("Bearer ") or headers.get("x-api-key", "")
            if not hmac.compare_digest(given.encode(), key.encode()):
                raise ApiError(401, "this path needs the key of --admin-key", code="invalid_api_key")
        elif not (scope.get("client") and is_loopback(scope["client"][0])):
            raise ApiError(403, "without --admin-key only the router's own machine may ask", code="admin_right")

    async def _own(self, scope: Scope, answer: CallerAnswer) -> None:
        path, query = scope["path"], QueryParams(scope["query_string"])
        if path == "/metrics":
            headers = (("content-type", "text/plain; version=0.0.4; charset=utf-8"),)
            await answer.whole(200, headers, self._metrics.render(self._fleet.replicas))
        elif path == "/router/replicas" and scope["method"] == "GET":
            await _json(answer, {"policy": self._config.policy, "replicas": self._fleet.shown()})
        elif path in ("/router/drain", "/router/undrain") and scope["method"] == "POST":
            replica = self._fleet.drain(query.get("replica", ""), path == "/router/drain")
            await _json(answer, {"url": replica.url, "draining": replica.draining, "outstanding": replica.outstanding})
        else:
            raise ApiError(404, f"there is no {path}: see GET /router/replicas", code="not_found")

    # --- what goes to a replica ---

    async def _call(self, scope: Scope, headers: Headers, receive: Receive) -> Call:
        body = await self._read(headers, receive)
        began = time.perf_counter()
        value: dict[str, Any] | None = None
        if scope["method"] == "POST" and "json" in headers.get("content-type", "json"):
            with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                found = msgspec.json.decode(body)
                value = found if isinstance(found, dict) else None
        model = value.get("model") if value is not None else None
        model = model if isinstance(model, str) else None
        path = scope["path"]
        prompt = await self._prompt(path, headers, value, model)
        forwarded = {name: text for name, text in headers.items() if name not in _DROPPED}
        forwarded["accept-encoding"] = "identity"
        forwarded.setdefault("x-request-id", uuid.uuid4().hex)
        peer = scope["client"][0] if scope.get("client") else ""
        forwarded["x-forwarded-for"] = ", ".join(filter(None, (headers.get("x-forwarded-for", ""), peer)))
        target = (scope.get("raw_path") or path.encode()).decode("latin-1")
        if scope["query_string"]:
            target += f"?{scope['query_string'].decode('latin-1')}"
        call = Call(scope["method"], path, target, forwarded, body, prompt, value, model, _max_tokens(value))
        self._metrics.choosing.observe(time.perf_counter() - began)
        return call

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        limit, pieces, size = self._config.max_body_bytes, [], 0
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            raise ApiError(413, f"the body has {length} bytes, the limit of this router is {limit}")
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _GoneError
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > limit:
                raise ApiError(413, f"the body has more than {limit} bytes")
            more = message.get("more_body", False)
        return b"".join(pieces)

    async def _prompt(self, path: str, headers: Headers, value: dict[str, Any] | None, model: str | None) -> Prompt:
        session = headers.get(SESSION_HEADER, "")
        if value is None or path not in (COMPLETIONS, CHAT):
            return Prompt((), 0, session=session)
        found = self._fleet.candidates(model) if self._fleet.policy.looks_up else []
        served = next((known for each in found if (known := each.served(model)) is not None), None)
        ids = await self._texts.token_ids(path, value, served)
        if ids is None:
            self._metrics.unread.inc()
            size = len(str(value.get("prompt") or value.get("messages") or ""))
            return Prompt((), size // _CHARS_PER_TOKEN, session=session)
        self._metrics.prompt_tokens.inc(len(ids))
        keys = {name: headers[name] for name in _KEYS if name in headers}
        salt = value.get("cache_salt")
        salt = salt if isinstance(salt, str) else ""
        roots = await asyncio.gather(*(each.root_of(keys, model, salt) for each in found))
        by_number = {each.number: root for each, root in zip(found, roots, strict=True)}
        return Prompt(ids, roots=by_number, session=session)


def _max_tokens(value: dict[str, Any] | None) -> int:
    if value is None:
        return 0
    stated = value.get("max_completion_tokens") or value.get("max_tokens")
    return stated if isinstance(stated, int) and 0 < stated < 1 << 31 else _DEFAULT_OUTPUT


async def _json(answer: CallerAnswer, value: Any) -> None:
    await answer.whole(200, (("content-type", "application/json"),), msgspec.json.encode(value))


async def _unless_gone(work: Any, receive: Receive) -> None:
    """Do `work`; if the caller leaves first, end it, and with it what the replica computes."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
