"""The transport over real sockets: ambiguous requests, limits before authentication, slow and silent clients."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from starlette.types import Receive, Scope, Send

from tests.unit.serve.live_server import echo, live, until

_GET = b"GET /hello HTTP/1.1\r\nHost: localhost\r\n\r\n"
_CLOSE = b"GET /hello HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_POST = b"POST / HTTP/1.1\r\nHost: localhost\r\n"

_REFUSED = {
    "length and chunks": (400, _POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "chunks and length": (400, _POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n"),
    "two lengths": (400, _POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc"),
    "list of lengths": (400, _POST + b"Content-Length: 3, 3\r\n\r\nabc"),
    "signed length": (400, _POST + b"Content-Length: +3\r\n\r\nabc"),
    "unknown encoding": (400, _POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"),
    "identity encoding": (400, _POST + b"Transfer-Encoding: identity\r\n\r\nabc"),
    "two encodings": (400, _POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    "folded header": (400, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n"),
    "bare line feeds": (400, b"GET / HTTP/1.1\nHost: localhost\n\n"),
    "one bare line feed": (400, b"GET / HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n"),
    "space before the colon": (400, b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n"),
    "zero byte": (400, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n"),
    "carriage return in a value": (400, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\rb\r\n\r\n"),
    "absolute target": (400, b"GET http://other/ HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "asterisk": (400, b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "bytes in the target": (400, b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "no host": (400, b"GET / HTTP/1.1\r\n\r\n"),
    "two hosts": (400, b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: other\r\n\r\n"),
    "two keys": (400, _POST + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n"),
    "HTTP 0.9": (505, b"GET /\r\n\r\n"),
    "HTTP 2": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "unknown version": (400, b"GET / HTTP/1.2\r\nHost: localhost\r\n\r\n"),
    "unknown method": (400, b"GOT / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "unknown method and a long head": (400, b"GOT / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 20_000),
    "method without routes": (405, b"PROPFIND / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "other protocol": (405, b"DESCRIBE / RTSP/1.0\r\nHost: localhost\r\n\r\n"),
    "tunnel": (405, b"CONNECT other:1 HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "WebSocket": (400, _GET[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"),
    "upgrade to HTTP 2": (400, _GET[:-2] + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n"),
    "trailer": (400, _POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-Api-Key: k\r\n\r\n"),
    "bad chunk": (400, _POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    "long target": (414, b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "endless target": (414, b"GET /" + b"a" * 20_000),
    "many headers": (431, b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 40 + b"\r\n"),
    "long header": (431, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 20_000),
    "long head": (431, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 9000 + b"\r\n\r\n"),
}


def _status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_every_ambiguous_or_oversized_request_is_refused_and_the_connection_closed() -> None:
    async def ask() -> None:
        async with live(max_header_bytes=8192, max_url_bytes=4096, max_header_count=32) as server:
            for name, (status, request) in _REFUSED.items():
                answer = await server.ask(request)
                assert answer.startswith(b"HTTP/1.1 "), name
                head, _, body = answer.partition(b"\r\n\r\n")
                assert (name, _status(answer)) == (name, status)
                assert b"connection: close" in head, name
                assert json.loads(body)["error"]["message"], name  # one answer and nothing after it
            assert _status(await server.ask(_CLOSE)) == 200
            assert server.counted["malformed"] > 20

    asyncio.run(ask())


def test_what_is_unusual_but_clear_is_served() -> None:
    async def ask() -> None:
        async with live() as server:
            extended = _POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\n\r\n"
            assert (await server.ask(extended)).endswith(b"POST / abc")
            assert _status(await server.ask(b"GET / HTTP/1.0\r\n\r\n")) == 200
            assert _status(await server.ask(b"\r\n\r\n" + _CLOSE)) == 200
            awaited = await server.connect(
                _POST + b"Connection: close\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
            )
            assert b"100 Continue" in await awaited.until(b"\r\n\r\n")
            await awaited.send(b"hi")
            assert (await awaited.rest()).endswith(b"POST / hi")

    asyncio.run(ask())


def test_of_pipelined_requests_only_the_first_is_answered() -> None:
    async def ask() -> None:
        async with live() as server:
            answer = await server.ask(_GET + b"GET /second HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
            assert answer.count(b"HTTP/1.1 ") == 1
            assert answer.endswith(b"GET /hello ")
            assert b"connection: close" in answer

    asyncio.run(ask())


def test_a_connection_serves_many_requests_one_after_the_other() -> None:
    async def ask() -> None:
        async with live() as server:
            client = await server.connect()
            for _ in range(3):
                await client.send(_GET)
                assert b"GET /hello " in await client.until(b"GET /hello ")
            client.close()

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("sent", "answer", "options"),
    [
        (b"", b"", {"header_timeout": 0.1}),
        (b"GET / HT", b"HTTP/1.1 408", {"header_timeout": 0.1}),
        (_POST + b"Content-Length: 10\r\n\r\nabc", b"HTTP/1.1 408", {"body_timeout": 0.1}),
        (_GET, b"HTTP/1.1 200", {"keep_alive_timeout": 0.1}),
        (_GET + b"\r\n", b"HTTP/1.1 200", {"keep_alive_timeout": 0.1, "header_timeout": 0.1}),
    ],
)
def test_silent_clients_are_disconnected(sent: bytes, answer: bytes, options: dict[str, float]) -> None:
    async def ask() -> None:
        async with live(**options) as server:
            got = await server.ask(sent)
            assert got.startswith(answer)
            assert got.count(b"HTTP/1.1") == (1 if answer else 0)
            await until(lambda: len(server.server.table) == 0)

    asyncio.run(ask())


def test_a_client_that_stops_reading_is_cut_off_and_its_work_ends() -> None:
    ended: list[str] = []

    async def stream(_scope: Scope, receive: Receive, send: Send) -> None:
        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            ended.append("disconnect")

        leaving = asyncio.ensure_future(leave())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not leaving.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)

    async def ask() -> None:
        async with live(stream, write_timeout=0.2) as server:
            client = socket.create_connection(server.address[:2])  # never read from
            client.sendall(_GET)
            await until(lambda: bool(ended))
            assert server.counted["write_timeout"] == 1
            client.close()

    asyncio.run(ask())


def test_a_flood_of_silent_connections_locks_nobody_out() -> None:
    async def ask() -> None:
        async with asyncio.timeout(20), live(max_connections=20, max_connections_per_address=20) as server:
            kept = await server.connect(_GET)
            await kept.until(b"GET /hello ")
            flood = [await server.connect(b"GET / HT") for _ in range(80)]
            assert _status(await server.ask(_HEALTH)) == 200  # the reserve
            await kept.send(_GET)  # who is connected is served
            assert await kept.until(b"GET /hello ")
            while not (answer := await server.ask(_CLOSE)).startswith(b"HTTP/1.1 200"):  # until the flood is old enough
                assert answer == b"" or _status(answer) == 503
            assert server.counted["connections"] > 0
            for client in [kept, *flood]:
                client.close()

    asyncio.run(ask())


def test_one_address_cannot_take_all_connections() -> None:
    async def ask() -> None:
        async with live(max_connections=100, max_connections_per_address=5) as server:
            busy = [await server.connect(_GET) for _ in range(5)]
            for client in busy:
                await client.until(b"GET /hello ")
            sixth = await server.connect(_CLOSE)
            answer = await sixth.rest()
            assert _status(answer) == 503
            assert b"retry-after" in answer
            other = await server.connect(_CLOSE, source="127.0.0.2")
            assert _status(await other.rest()) == 200
            for client in busy:
                client.close()
            await until(lambda: len(server.server.table) == 0)
            assert _status(await server.ask(_CLOSE)) == 200

    asyncio.run(ask())


def test_an_early_answer_does_not_leave_an_endless_body_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The application answers before the body came; body and framing are bounded all the same."""
    monkeypatch.setattr("tokenmill.serve.transport.http_protocol._DISCARDED_BYTES", 4000)

    async def refuse(_scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async def ask() -> None:
        async with live(refuse, max_body_bytes=1000, max_header_bytes=256) as server:
            client = await server.connect(_POST + b"Transfer-Encoding: chunked\r\n\r\n")
            await client.until(b"\r\n\r\n")
            for _ in range(100):
                await client.send(b"1;" + b"x" * 100 + b"\r\na\r\n")
            assert await client.rest() == b""
            assert server.counted["body_bytes"] == 1

    asyncio.run(ask())


def test_the_application_sees_no_request_that_was_refused() -> None:
    seen: list[str] = []

    async def note(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["path"])
        await echo(scope, receive, send)

    async def ask() -> None:
        async with live(note) as server:
            for name in ("unknown encoding", "two keys", "absolute target", "WebSocket", "two hosts"):
                await server.ask(_REFUSED[name][1])
            assert seen == []

    asyncio.run(ask())
