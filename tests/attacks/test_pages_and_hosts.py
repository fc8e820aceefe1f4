"""Web pages that reach a local server, and what the server's own pages load (S11)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks import attack_client as client
from tests.attacks.conftest import FLAGS, AttackedServer
from tests.e2e.serving import RunningServer

_BODY = {"prompt": "Once", "max_tokens": 1}


@pytest.fixture(scope="module")
def keyless(model_path: Callable[[str], Path]) -> Iterator[RunningServer]:
    """As it starts on a developer's machine: no keys, on the loopback address."""
    server = RunningServer(model_path("stories15m"), *FLAGS)
    yield server
    server.stop()


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"]
)
def test_s11_another_name_for_this_address_is_refused(keyless: RunningServer, host: str) -> None:
    """DNS rebinding: the page of an attacker whose name now points to 127.0.0.1."""
    for path in ("/v1/models", "/", "/metrics"):
        answer = keyless.http.get(path, headers={"Host": host})
        assert answer.status_code in (400, 403, 421), f"{path}: {answer.status_code}"
    answer = keyless.http.post("/v1/completions", json=_BODY, headers={"Host": host})
    assert answer.status_code in (400, 403, 421)


def test_s11_the_right_names_work(keyless: RunningServer) -> None:
    port = httpx.URL(keyless.url).port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost", f"[::1]:{port}"):
        assert keyless.http.get("/v1/models", headers={"Host": host}).status_code == 200, host


def test_s11_a_page_of_another_site_cannot_send_a_body(keyless: RunningServer) -> None:
    """What a browser sends without asking first is no JSON request, or is refused by its origin."""
    headers = {"Content-Type": "text/plain", "Origin": "https://evil.example"}
    answer = keyless.http.post("/v1/completions", content=b'{"prompt": "Once", "max_tokens": 1}', headers=headers)
    assert "access-control-allow-origin" not in answer.headers
    assert answer.status_code in (400, 403, 415, 422), answer.status_code


def test_s11_two_hosts_or_none_are_refused(keyless: RunningServer) -> None:
    target = client.Target(keyless.url)
    for hosts in (b"", b"Host: localhost\r\nHost: evil.example\r\n"):
        answer = client.answer_to(target, b"GET /v1/models HTTP/1.1\r\n" + hosts + b"\r\n", 1.0)
        assert answer[9:12] in (b"400", b"403", b"421", b""), answer[:80]


@pytest.mark.parametrize("path", ["/", "/docs", "/dashboard"])
def test_s11_pages_load_nothing_from_elsewhere(served: AttackedServer, path: str) -> None:
    answer = served.http.get(path)
    if answer.status_code in (401, 404):
        pytest.skip(f"there is no {path}")
    loaded = re.findall(r"""(?:src|href)\s*=\s*["']((?:https?:)?//[^"']+)""", answer.text)
    loaded += re.findall(r"""(?:import|url|fetch)\s*\(?\s*["']((?:https?:)?//[^"']+)""", answer.text)
    assert not loaded, loaded
