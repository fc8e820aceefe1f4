"""Clients that hold connections: slow, silent, many, with huge heads, or with two meanings (S6, R8)."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks import attack_client as client
from benchmarks import attack_payloads as payloads
from benchmarks import attack_shapes as shapes
from benchmarks.soak_verdict import resident
from benchmarks.tenant_keys import key_of, known_flags
from tests.attacks.conftest import AttackedServer
from tests.attacks.tenant import Prober, streaming
from tests.e2e.serving import wait_until

_FEW_FILES = 300
_HARMLESS = ("bare newlines", "absolute address", "folded header", "no version")  # one request, however it is read


@pytest.fixture(scope="module")
def impatient(tiny_chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServer]:
    """Short limits and few open files, so that the attacks can be short and small as well."""
    flags = known_flags(
        header_timeout="1", body_timeout="1", keep_alive_timeout="1", write_timeout="1", max_connections="200"
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FEW_FILES, hard))  # inherited by the server
    try:
        server = AttackedServer(tiny_chat, tmp_path_factory.mktemp("impatient") / "keys.json", *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    yield server
    server.stop()


def _closed(connection: socket.socket, seconds: float = 25.0) -> bool:
    """Whether the server ends the connection, with or without an answer."""
    connection.settimeout(seconds)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(b"", id="silent"),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: ", id="half a head"),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", id="kept alive"),
    ],
)
def test_s6_a_connection_that_says_nothing_more_is_closed(impatient: AttackedServer, start: bytes) -> None:
    with shapes.open_connections(impatient.target(), 1, start) as (connection,):
        assert _closed(connection)


def test_s6_a_body_that_does_not_come_is_not_waited_for(impatient: AttackedServer) -> None:
    target = impatient.target()
    head = b"POST /v1/completions HTTP/1.1\r\n" + target.head() + b"Content-Length: 100000\r\n\r\n{"
    with shapes.open_connections(target, 1, head) as (connection,):
        assert _closed(connection)


def test_s6_without_a_key_no_body_is_read(served: AttackedServer) -> None:
    """Eight MiB of a stranger: refused before they have been sent."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8000000\r\n\r\n{"
    answer = client.answer_to(served.target(None), head, 5.0)
    assert answer.startswith(b"HTTP/1.1 401"), answer[:100]


@pytest.mark.parametrize("attack", [shapes.idle_connections, shapes.slow_bodies])
def test_s6_health_answers_while_more_connections_come_than_there_are_files(
    impatient: AttackedServer, attack: Callable[..., client.Statuses]
) -> None:
    """Twice as many connections as the server may have files: some are refused or cut, and the probe gets through."""
    holding = threading.Thread(target=attack, args=(impatient.target(), 2 * _FEW_FILES, 7.0))
    holding.start()
    try:
        time.sleep(1.5)  # until they are all there; the limit on heads is shorter

        def healthy() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{impatient.url}/health", timeout=3).status_code == 200
            return False

        wait_until(healthy, 5)
        assert holding.is_alive()
    finally:
        holding.join()


def test_s6_a_tenant_streams_through_slow_clients(served: AttackedServer) -> None:
    with streaming(served.url, key_of("good")), Prober(served.url, key_of("other")) as prober:
        for attack in (shapes.slow_heads, shapes.slow_bodies, shapes.idle_connections):
            attack(served.target(), 400, 1.0)
    assert not prober.failures


def test_s6_headers_have_a_limit(served: AttackedServer) -> None:
    before = resident(served.process.pid)
    with streaming(served.url, key_of("good")), Prober(served.url, key_of("other")) as prober:
        statuses = shapes.huge_headers(served.target())
    assert set(statuses) <= {"400", "413", "414", "431", "cut"}, statuses
    assert not prober.failures
    assert resident(served.process.pid) - before < 64 << 20


def test_s6_an_address_has_a_limit(served: AttackedServer) -> None:
    line = b"GET /version?" + b"a" * 300_000 + b" HTTP/1.1\r\n" + served.target().head() + b"\r\n"
    answer = client.answer_to(served.target(), line, 2.0)
    assert answer[9:12] in (b"400", b"413", b"414", b"431", b""), answer[:60]


@pytest.mark.parametrize("name", payloads.SMUGGLING)
def test_s6_a_request_has_one_meaning(served: AttackedServer, name: str) -> None:
    """Whatever is odd about it: refused or read as one request; what hides in its body is never answered."""
    data = payloads.SMUGGLING[name].replace(b"{head}", served.target().head())
    answer = client.answer_to(served.target(), data, 0.5)
    assert b'"object":"list"' not in answer.replace(b" ", b""), answer[:300]
    assert answer.count(b"HTTP/1.1 ") <= 2
    assert b"HTTP/1.1 500" not in answer, answer[:300]
    assert b"HTTP/1.1 200" not in answer or name in _HARMLESS, answer[:300]


def test_r8_a_stream_that_is_not_read_is_cut(impatient: AttackedServer) -> None:
    """More than all buffers hold, and a client that reads only long after the limit: the end never comes."""
    target = impatient.target()
    fields = {"max_tokens": 200, "n": 16, "stream": True, "logprobs": 20, "ignore_eos": True}
    body = json.dumps({"prompt": "Once", **fields})
    head = b"POST /v1/completions HTTP/1.1\r\n" + target.head() + b"Content-Type: application/json\r\n"
    with streaming(impatient.url, key_of("good"), patience=None), socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(target.address)
        connection.sendall(head + f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
        connection.recv(1, socket.MSG_PEEK)  # it has begun
        wait_until(lambda: impatient.load()["requests_running"] <= 1, 60)  # the tenant's own
        time.sleep(3.0)  # longer than the limit of one second
        received = b""
        connection.settimeout(10)
        with contextlib.suppress(OSError):
            while chunk := connection.recv(1 << 20):
                received += chunk
    assert b"data: [DONE]" not in received
    impatient.wait_idle(40)


def test_r8_a_waiting_stream_gets_comments(tiny_chat: Path, tmp_path: Path) -> None:
    """Proxies cut connections that are silent: comments come before the first token."""
    flags = known_flags(sse_ping="0.2")
    server = AttackedServer(tiny_chat, tmp_path / "keys.json", "--concurrency", "1", *flags)
    try:
        body = {"prompt": "Once", "max_tokens": 200, "n": 16, "ignore_eos": True}
        waiting = {"prompt": "Once", "max_tokens": 1, "stream": True, "lane": "batch"}
        with client.pending(server.target("good"), "/v1/completions", [body]), server.target().http() as http:
            wait_until(lambda: server.load()["requests_running"] > 0, 20)
            with http.stream("POST", "/v1/completions", json=waiting) as answer:
                assert answer.status_code == 200
                first = next(line for line in answer.iter_lines() if line)
        assert first.startswith(":"), first
    finally:
        server.stop()
