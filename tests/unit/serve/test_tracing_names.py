"""Names of spans come from the routes; headers of the caller's trace are used only if they are well formed."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.datastructures import Headers

from tokenmill.serve.tracing import UNKNOWN, span_name, trace_context

_PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("GET", "/v1/models/any/thing", "GET /v1/models/{name:path}"),
        ("GET", "/attack-1", UNKNOWN),
        ("POST", "/v1/models/x", "POST /v1/models/{name:path}"),
        ("BREW", "/v1/models/x", UNKNOWN),
    ],
)
def test_a_span_is_named_by_its_route(method: str, path: str, name: str) -> None:
    app = FastAPI()
    scopes: list[Any] = []

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> str:
        return name

    async def kept(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await app(scope, receive, send)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(kept), base_url="http://localhost") as client:
            await client.request(method, path)

    asyncio.run(ask())
    assert span_name(scopes[0]) == name


def test_a_well_formed_parent_is_used() -> None:
    assert trace_context(Headers({"traceparent": _PARENT})) == {"traceparent": _PARENT}
    both = trace_context(Headers({"traceparent": _PARENT, "tracestate": "a=1"}))
    assert both == {"traceparent": _PARENT, "tracestate": "a=1"}
    assert "tracestate" not in trace_context(Headers({"traceparent": _PARENT, "tracestate": "a" * 600}))


@pytest.mark.parametrize(
    "parent",
    ["", "x", _PARENT.upper(), _PARENT + "-more", "ff" + _PARENT[2:], f"00-{'0' * 32}-{'cd' * 8}-01", _PARENT + "\n"],
)
def test_a_malformed_parent_is_not(parent: str) -> None:
    assert trace_context(Headers({"traceparent": parent, "tracestate": "a=1"})) == {}
    twice = Headers(raw=[(b"traceparent", _PARENT.encode())] * 2)
    assert trace_context(twice) == {}
