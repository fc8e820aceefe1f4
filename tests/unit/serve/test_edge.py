"""The edge around a small application: Host and Origin, wrong keys, security headers, paths behind a proxy."""

from __future__ import annotations

import asyncio
import base64
import re
from importlib.resources import files
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp

from tests.unit.serve.live_server import echo, live
from tokenmill.serve import edge as edge_module
from tokenmill.serve.api.page import add_page_routes
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.edge import Edge, route_path
from tokenmill.serve.metrics import Metrics
from tokenmill.serve.tenants.keys import Client, KeyRing, digest_of


async def _plain(scope: Any, receive: Any, send: Any) -> None:
    scope["state"]["tokenmill.connection"] = _Connection()
    await echo(scope, receive, send)


class _Connection:
    trusted = 0

    def trust(self) -> None:
        self.trusted += 1


def _get(app: ASGIApp, path: str = "/v1/models", method: str = "GET", **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8000") as client:
            return await client.request(method, path, headers=sent)

    return asyncio.run(ask())


def _edge(keys: KeyRing | None = None, app: ASGIApp = _plain, **options: Any) -> Edge:
    return Edge(app, keys or KeyRing(), Metrics("m"), ServeConfig(access_log=False, **options))


_KEYS = KeyRing([(digest_of("good"), Client("good"))])


def test_a_local_server_without_keys_serves_its_own_names_and_pages_only() -> None:
    app = _edge()
    assert _get(app).status_code == 200
    foreign = _get(app, host="evil.example:8000")
    assert foreign.status_code == 421
    assert "--allowed-host" in foreign.json()["error"]["message"]
    assert _get(app, "/health", host="10.0.0.3:8000").status_code == 200  # a probe by address
    assert _get(app, method="POST", origin="https://evil.example").status_code == 403
    assert _get(app, method="POST", origin="http://localhost:8000").status_code == 200
    for open_app in (_edge(_KEYS), _edge(host="0.0.0.0"), _edge(uds="/run/api.sock")):
        assert _get(open_app, host="any.example", x_api_key="good").status_code == 200
    assert _get(_edge(_KEYS, allowed_host=("api.example",)), host="any.example", x_api_key="good").status_code == 421


def test_a_probe_about_one_model_needs_a_key() -> None:
    for probe in ("/readyz", "/health", "/ping", "/livez"):
        assert _get(_edge(_KEYS), probe).status_code == 200
        for query in ("model=x", "model=", "a=b&%6dodel=x"):
            assert _get(_edge(_KEYS), f"{probe}?{query}").status_code == 401
            assert _get(_edge(_KEYS), f"{probe}?{query}", x_api_key="good").status_code == 200
            assert _get(_edge(), f"{probe}?{query}").status_code == 200  # without keys nobody is a stranger


def test_wrong_keys_are_slowed_and_valid_ones_never(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(edge_module.asyncio, "sleep", sleep)
    app = _edge(_KEYS, wrong_key_limit=3)
    assert [_get(app, x_api_key="bad").status_code for _ in range(5)] == [401, 401, 401, 429, 429]
    assert slept == [edge_module.DELAY] * 2
    assert [_get(app, x_api_key="good").status_code for _ in range(5)] == [200] * 5
    assert _get(app).status_code == 401  # no key at all is not a guess
    assert len(slept) == 2


def test_only_a_valid_request_makes_a_connection_trusted() -> None:
    async def ask(key: bytes) -> bool:
        async with live(_edge(_KEYS, app=_answer)) as server:
            client = await server.connect(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: " + key + b"\r\n\r\n")
            await client.until(b"\r\n\r\n")
            trusted = [slot.trusted for slot in server.server.table._slots]
            client.close()
            return trusted == [True]

    assert asyncio.run(ask(b"good"))
    assert not asyncio.run(ask(b"bad"))


async def _answer(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def test_every_answer_has_security_headers() -> None:
    pages = FastAPI(docs_url=None, redoc_url=None)
    add_page_routes(pages, None)  # type: ignore[arg-type]
    for app, path in (
        (_edge(), "/v1/models"),
        (_edge(_KEYS), "/"),
        (_edge(app=pages), "/"),
        (_edge(app=pages), "/docs"),
    ):
        headers = _get(app, path).headers
        assert headers.get_list("x-content-type-options") == ["nosniff"]
        assert headers.get_list("referrer-policy") == ["no-referrer"]
        (policy,) = headers.get_list("content-security-policy")
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy


def test_pages_load_nothing_from_elsewhere() -> None:
    """The documentation is one file, its script and style allowed by their hashes; the page has files beside it."""
    folder = files("tokenmill.serve").joinpath("static")
    names = ["index.html", "docs.html", *(f"page/{each.name}" for each in folder.joinpath("page").iterdir())]
    for name in names:
        text = folder.joinpath(name).read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.findall(r"(?:src|href|action)\s*=\s*[\"']?(?!data:,)[^\"'\s>]*(?:https?:)?//", text), name
        assert not re.findall(r"https?://|@import|import\(|innerHTML|document\.write|eval\(", text), name
        assert not re.findall(r"<[^>]+\s(?:on\w+|style)\s*=\s*[\"']", text), name
        assert len(text.splitlines()) <= 400, name
        if name == "docs.html":
            assert (text.count("<script>"), text.count("<script")) == (1, 1)
            assert (text.count("<style>"), text.count("<style")) == (1, 1)
        if name == "index.html":
            assert "<style" not in text
            assert all(found.startswith("page/") for found in re.findall(r"<script[^>]* src=\"([^\"]+)", text))
            assert text.count("<script") == text.count("></script>")


def test_the_files_of_the_page_need_no_key_and_nothing_else_is_open() -> None:
    pages = FastAPI(docs_url=None, redoc_url=None)
    add_page_routes(pages, None)  # type: ignore[arg-type]
    app = _edge(_KEYS, app=pages)
    found = _get(app, "/")
    assert found.headers["content-type"] == "text/html; charset=utf-8"
    parts = re.findall(r"\"(page/[^\"]+)", found.text)
    assert len(parts) >= 5
    for part in parts:
        answer = _get(app, f"/{part}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].split(";")[0] in ("text/javascript", "text/css", "image/svg+xml")
        again = _get(app, f"/{part}", if_none_match=answer.headers["etag"])
        assert (again.status_code, again.content) == (304, b"")
    for path in ("/docs", "/page/", "/page/none.js", "/page/%2e%2e/docs", "/v1/models"):
        refused = _get(app, path)
        assert refused.status_code == 401, path
        assert refused.headers["www-authenticate"].startswith("Basic ")
    assert _get(app, "/", method="POST").status_code == 401
    script = _get(app, "/v1/models", sec_fetch_mode="cors")
    assert script.headers["www-authenticate"].startswith("Bearer "), "for Basic the browser opens a dialog of its own"


def test_the_page_finds_its_files_behind_a_proxy() -> None:
    pages = FastAPI(docs_url=None, redoc_url=None, root_path="/llm")
    add_page_routes(pages, None)  # type: ignore[arg-type]
    app = _edge(_KEYS, app=pages, root_path="/llm")
    for page in ("/", "/llm/"):
        assert 'src="/llm/page/main.js"' in _get(app, page).text
    assert _get(app, "/llm/page/main.js").status_code == 200
    assert _get(app, "/llm/docs").status_code == 401


def test_other_sites_cannot_borrow_a_key() -> None:
    app = _edge(_KEYS)
    for password, status in (("good", 200), ("wrong", 401), ("", 401)):
        basic = "Basic " + base64.b64encode(f"anyone:{password}".encode()).decode()
        assert _get(app, authorization=basic).status_code == status
        for site, borrowed in (("same-origin", status), ("none", status), ("cross-site", 401), ("same-site", 401)):
            assert _get(app, authorization=basic, sec_fetch_site=site).status_code == borrowed
    assert _get(app, authorization="Basic %%%").status_code == 401


@pytest.mark.parametrize(
    ("path", "root", "route"),
    [
        ("/health", "", "/health"),
        ("/llm/health", "/llm", "/health"),
        ("/health", "/llm", "/health"),
        ("/llmhealth", "/llm", "/llmhealth"),
        ("/llm/v1/models", "/llm", "/v1/models"),
    ],
)
def test_paths_are_the_same_behind_a_proxy(path: str, root: str, route: str) -> None:
    assert route_path(path, root) == route


def test_probes_are_open_behind_a_proxy_too() -> None:
    app = _edge(_KEYS, root_path="/llm")
    assert _get(app, "/llm/health").status_code == 200
    assert _get(app, "/health").status_code == 200
    assert _get(app, "/llm/v1/models").status_code == 401
