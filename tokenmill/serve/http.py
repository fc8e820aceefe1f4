"""The HTTP server proper: uvicorn around the application, with our connection limits; signals are left to server.py."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from tokenmill.serve.app import build_app
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.connections import ConnectionTable, TransferLimits
from tokenmill.serve.http_protocol import LimitedProtocol
from tokenmill.serve.keys import KeyRing
from tokenmill.serve.service import Service

_NO_TIMER = 7 * 24 * 3600


class HttpServer(uvicorn.Server):
    """Connections are checked for slowness from uvicorn's own tick, so that no request needs a timer of its own."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ServeConfig,
        tls: ssl.SSLContext | None = None,
        count: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=LimitedProtocol,
            timeout_keep_alive=_NO_TIMER,  # ours is checked with the other limits
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
        )
        super().__init__(config)
        self.limits = limits
        self.count = count  # of connections that were refused or cut, by reason
        self.table = ConnectionTable(limits.max_connections, limits.max_connections_per_address)
        self.transfer_limits = TransferLimits(
            limits.header_timeout,
            limits.body_timeout,
            limits.min_body_rate,
            limits.keep_alive_timeout,
            limits.write_timeout,
        )
        self._tls = tls
        self._checked = 0.0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """While draining, requests are answered with 503; uvicorn's own handlers would close the port."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.servers = []

        def protocol() -> LimitedProtocol:
            return LimitedProtocol(self, config=self.config, server_state=self.server_state, app_state={}, _loop=loop)

        for listener in sockets or ():
            server = await loop.create_server(
                protocol,
                sock=listener,
                ssl=self._tls,
                backlog=self.config.backlog,
                ssl_handshake_timeout=self.limits.tls_handshake_timeout if self._tls is not None else None,
            )
            self.servers.append(server)
        self._checked = loop.time()
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        now = asyncio.get_running_loop().time()
        interval = self.transfer_limits.interval()
        passed = now - self._checked
        if passed >= interval:
            self._checked = now
            for connection in list(self.server_state.connections):
                connection.check(min(passed, 2 * interval))  # type: ignore[union-attr]
        return await super().on_tick(counter)


def make_server(service: Service, keys: KeyRing, tls: ssl.SSLContext | None = None) -> HttpServer:
    app = build_app(service, keys)
    return HttpServer(app, service.config, tls, lambda reason: service.metrics.add("connections_refused", 1.0, reason))
