"""The HTTP server proper: uvicorn around the application, with our connection limits; signals are left to server.py."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from tokenmill.log import get_logger
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.transport.connections import ConnectionTable, Slot, TransferLimits, address_group
from tokenmill.serve.transport.http_protocol import LimitedProtocol
from tokenmill.serve.transport.refusals import Refusals

_log = get_logger(__name__)
_NO_TIMER = 7 * 24 * 3600
_ACCEPT_PAUSE = 0.1  # seconds, where no file is left


class HttpServer(uvicorn.Server):
    """Connections are checked for slowness from uvicorn's own tick, so that no request needs a timer of its own."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ServeConfig,
        tls: ssl.SSLContext | None = None,
        count: Callable[[str], None] = lambda _reason: None,
        body_limit: Callable[[str], int] | None = None,
    ) -> None:
        """`body_limit`: of a body by path, unless it is that of `limits`."""
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
        self.body_limit = body_limit or limits.body_limit
        self.count = count  # of connections that were refused or cut, by reason
        self.refusals = Refusals(limits.refusal_limit)
        self.table = ConnectionTable(limits.max_connections, limits.max_connections_per_address)
        self.transfer_limits = TransferLimits(
            limits.header_timeout,
            limits.body_timeout,
            limits.min_body_rate,
            limits.keep_alive_timeout,
            limits.write_timeout,
        )
        self._tls = tls
        self._accepting: list[asyncio.Task[None]] = []
        self._checked = 0.0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """While draining, requests are answered with 503; uvicorn's own handlers would close the port."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.servers = []
        for listener in sockets or ():
            if self._tls is not None:
                self._accepting.append(loop.create_task(self._accept_tls(listener, self._tls)))
            else:
                server = await loop.create_server(self._protocol, sock=listener, backlog=self.config.backlog)
                self.servers.append(server)
        self._checked = loop.time()
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await super().shutdown(sockets)

    def _protocol(self, slot: Slot | None = None) -> LimitedProtocol:
        return LimitedProtocol(self, slot, config=self.config, server_state=self.server_state, app_state={})

    async def _accept_tls(self, listener: socket.socket, tls: ssl.SSLContext) -> None:
        """With TLS the event loop would tell us of a connection only after its handshake: clients that never finish
        one could take every file the process may open. So connections are accepted, and counted, here."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        listener.listen(self.config.backlog)
        while True:
            try:
                connection, peer = await loop.sock_accept(listener)
            except OSError as error:
                _log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE)
                continue
            task = loop.create_task(self._handshake(connection, peer, tls))
            self.server_state.tasks.add(task)
            task.add_done_callback(self.server_state.tasks.discard)

    async def _handshake(self, connection: socket.socket, peer: Any, tls: ssl.SSLContext) -> None:
        def evicted() -> None:
            self.count("connections")
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # the handshake then fails

        loop = asyncio.get_running_loop()
        address = address_group(peer[0]) if isinstance(peer, tuple) else ""
        slot = self.table.admit(address, evicted, loop.time())
        try:
            await loop.connect_accepted_socket(
                lambda: self._protocol(slot),
                connection,
                ssl=tls,
                ssl_handshake_timeout=self.limits.tls_handshake_timeout,
            )
        except OSError as error:  # an SSLError, a timeout, a client that left
            self.table.release(slot)
            self.count("tls_handshake")
            _log.debug("TLS handshake failed: %s", error)

    async def on_tick(self, counter: int) -> bool:
        now = asyncio.get_running_loop().time()
        interval = self.transfer_limits.interval()
        passed = now - self._checked
        if passed >= interval:
            self._checked = now
            for connection in list(self.server_state.connections):
                connection.check(min(passed, 2 * interval))  # type: ignore[union-attr]
        return await super().on_tick(counter)
