"""The real HTTP server in this process around a small ASGI application, and raw sockets to talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from tokenmill.serve.config import ServeConfig
from tokenmill.serve.transport.http import HttpServer
from tokenmill.serve.transport.listening import listening

_SECONDS = 20.0


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the method, the path and the body; trusts every connection, as a server without keys does."""
    scope["state"]["tokenmill.connection"].trust()
    body = b""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    answer = b"%s %s %s" % (scope["method"].encode(), scope["path"].encode(), body)
    headers = [(b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


class Live:
    def __init__(self, server: HttpServer, address: Any, counted: Counter[str]) -> None:
        self.server = server
        self.address = address
        self.counted = counted  # refusals by reason

    async def connect(self, data: bytes = b"", tls: ssl.SSLContext | None = None, source: str = "127.0.0.1") -> Client:
        if isinstance(self.address, str):
            streams = await asyncio.open_unix_connection(self.address)
        else:
            name = "localhost" if tls is not None else None
            streams = await asyncio.open_connection(
                *self.address[:2], ssl=tls, server_hostname=name, local_addr=(source, 0)
            )
        client = Client(*streams)
        if data:
            await client.send(data)
        return client

    async def ask(self, data: bytes) -> bytes:
        """Everything that comes back until the server closes the connection."""
        client = await self.connect(data)
        try:
            return await client.rest()
        finally:
            client.close()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def rest(self) -> bytes:
        found = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(_SECONDS):
                while data := await self.reader.read(1 << 16):
                    found += data
        return found

    async def until(self, text: bytes) -> bytes:
        async with asyncio.timeout(_SECONDS):
            return await self.reader.readuntil(text)

    def close(self) -> None:
        self.writer.close()


@contextlib.asynccontextmanager
async def live(app: ASGIApp = echo, tls: ssl.SSLContext | None = None, **options: Any) -> AsyncIterator[Live]:
    config = ServeConfig(port=0, **options)
    counted: Counter[str] = Counter()

    def count(reason: str) -> None:
        counted[reason] += 1

    server = HttpServer(app, config, tls, count)
    with listening(config) as listener:
        listener.listen()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        try:
            yield Live(server, listener.getsockname(), counted)
        finally:
            server.should_exit = True
            server.config.timeout_graceful_shutdown = 1
            await serving


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)
