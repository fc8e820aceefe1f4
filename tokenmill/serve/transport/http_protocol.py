"""One client connection: uvicorn's httptools protocol with limits, and without what makes HTTP/1.1 ambiguous.

Refused: heads that are too long or slow, targets that are not a path, more than one Host, upgrades, trailers, methods
that no route has. A pipelined request is not read: the connection closes after the answer before it. What a request
asks is decided by the application; connections.py has the bookkeeping, http.py calls `check` about once a second.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tokenmill.log import get_logger
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.errors import ApiError
from tokenmill.serve.transport.connections import (
    ConnectionTable,
    Phase,
    Slot,
    TransferClock,
    TransferLimits,
    address_group,
)
from tokenmill.serve.transport.refusals import Refusals

_log = get_logger(__name__)
PROBE_PATHS = (b"/livez", b"/readyz", b"/health", b"/ping")
CONNECTION_KEY = "tokenmill.connection"  # in the ASGI scope's state: the protocol, for `trust`
_METHODS = (b"GET", b"HEAD", b"POST", b"OPTIONS", b"PUT", b"DELETE", b"PATCH")
_SINGLE = (b"host", b"content-length", b"transfer-encoding", b"authorization")
_DISCARDED_BYTES = 16 << 20
_UNSENT_BYTES = 1 << 16  # in the kernel: more is kept here, where a client that does not read is noticed


class ConnectionOwner(Protocol):
    """What all connections of a server share."""

    limits: ServeConfig
    body_limit: Callable[[str], int]  # bytes, by path
    transfer_limits: TransferLimits
    table: ConnectionTable
    refusals: Refusals  # of malformed requests, by address
    count: Callable[[str], None]  # of connections that were refused or cut, by reason


class LimitedProtocol(HttpToolsProtocol):
    def __init__(self, server: ConnectionOwner, slot: Slot | None, **arguments: Any) -> None:
        """`slot`: the one that the connection has since its TLS handshake began."""
        super().__init__(**arguments)
        self._server = server
        self._limits = server.limits
        self._clock = TransferClock(server.transfer_limits)
        self._head_bytes = self._wire_bytes = 0
        self.url, self.headers = b"", []
        self._refusal = ApiError(400, "this is not a valid HTTP/1.1 request")
        self._reason = "malformed"
        self._deaf = False  # a pipelined request came: nothing more is read
        self._slot = slot

    # --- the transport's side ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _bound_unsent(transport)
        if self._slot is None:
            self._slot = self._server.table.admit(self._address(), self._evicted, self.loop.time())
        self._slot.close = self._evicted

    def connection_lost(self, exc: Exception | None) -> None:
        if self._slot is not None:
            self._server.table.release(self._slot)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf or self.transport.is_closing():
            return
        if self._clock.phase is Phase.IDLE:
            self._clock.enter(Phase.HEAD)
            self._head_bytes = 0
        if self._clock.phase is Phase.HEAD:
            room = self._limits.max_header_bytes - self._head_bytes
            self._head_bytes += len(data)
            if len(data) > room:
                self._feed(data[:room])
                if self._deaf or self.transport.is_closing():
                    return
                if self._clock.phase is Phase.HEAD:
                    self._refuse_head()
                    return
                data = data[room:]
        elif self._clock.phase is Phase.BODY:
            self._wire_bytes += len(data)
        self._feed(data)
        if self._clock.phase is Phase.BODY and self._wire_bytes > self._max_wire_bytes():
            self.refuse(ApiError(413, "the body and its framing are too long"), "body_bytes")

    def _max_wire_bytes(self) -> int:
        """Of a body with its framing. One that was refused is read on for a while: a client that is cut off while it
        sends may never see the answer."""
        head, limit = self._limits.max_header_bytes, self._server.body_limit
        if self.cycle.response_complete:
            return max(2 * limit("") + head, _DISCARDED_BYTES)
        return 2 * limit(self.scope["path"]) + head

    def _feed(self, data: bytes) -> None:
        if self._deaf or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self._deaf:
                self.refuse(self._refusal, self._reason)
            return
        if self._clock.phase is Phase.HEAD and len(self.url) > self._limits.max_url_bytes:
            self._refuse_head()

    # --- the parser's side ---

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
            self._deaf = True
            raise ValueError("a pipelined request")  # ends this parse
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._clock.phase is Phase.BODY:
            self._fail(400, "trailers are not supported: leave them out")
        if len(self.headers) >= self._limits.max_header_count:
            self._fail(431, f"the request has more than {self._limits.max_header_count} headers", "header_count")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_head()
        assert self._slot is not None
        if self._slot.probe_only and self.url.partition(b"?")[0] not in PROBE_PATHS:
            self._fail(503, "too many connections are open: try again later", "connections")
        self.scope["state"][CONNECTION_KEY] = self
        super().on_headers_complete()
        self._clock.enter(Phase.BODY)
        self._wire_bytes = 0
        if self._slot.probe_only:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._clock.num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._clock.enter(Phase.IDLE if self.cycle.response_complete else Phase.RESPONSE)

    def on_response_complete(self) -> None:
        if self._clock.phase is Phase.RESPONSE:
            self._clock.enter(Phase.IDLE)
        super().on_response_complete()

    def _check_head(self) -> None:
        method = self.parser.get_method()
        if method not in _METHODS:
            self._fail(405, "this method is not supported")
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            self._fail(505, "only HTTP/1.1 and HTTP/1.0 are supported")
        if self.parser.should_upgrade():
            self._fail(400, "protocol upgrades and WebSockets are not supported: send plain HTTP/1.1")
        if len(self.url) > self._limits.max_url_bytes:
            self._fail(414, f"the request target has more than {self._limits.max_url_bytes} bytes", "url_bytes")
        if not self.url.startswith(b"/"):
            self._fail(400, "the request target must be a path that starts with /")
        names = [name for name, _ in self.headers]
        if any(names.count(name) > 1 for name in _SINGLE):
            self._fail(400, "a header that may come once came twice")
        if b"host" not in names and self.parser.get_http_version() == "1.1":
            self._fail(400, "the Host header is missing")
        for name, value in self.headers:
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                self._fail(400, "the only transfer encoding is chunked")

    def _fail(self, status: int, message: str, reason: str = "malformed") -> NoReturn:
        """Stop parsing: the parser passes exceptions of callbacks on as errors of its own."""
        self._refusal = ApiError(status, message, retry_after=1.0 if status == 503 else None)
        self._reason = reason
        raise self._refusal

    # --- limits ---

    def trust(self) -> None:
        """The application accepted a request of this connection's client."""
        if self._slot is not None and not self._slot.trusted:
            self._server.table.trust(self._slot)

    def check(self, seconds: float) -> None:
        """Close the connection if it has been too slow; `seconds` have passed since the last call."""
        cycle = self.cycle
        exceeded = self._clock.tick(
            seconds,
            reading=self.flow is not None and not self.flow.read_paused,
            answered=cycle is not None and cycle.response_complete,
            unwritten=self.transport.get_write_buffer_size(),
        )
        if exceeded is None:
            return
        if exceeded == "keep_alive_timeout":
            self.transport.close()
        elif exceeded == "write_timeout" or self.transport.is_closing():
            self._server.count(exceeded)
            self.transport.abort()
        else:
            self.refuse(ApiError(408, f"the request was sent too slowly ({exceeded})"), exceeded)

    def refuse(self, error: ApiError, reason: str) -> None:
        """Close the connection, with an error where it is the answer to a request and not part of another answer."""
        self._server.count(reason)
        cycle = self.cycle
        asked = self._clock.phase is Phase.HEAD and self._head_bytes > 0
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started:
                self.transport.abort()
                return
            asked = True
            cycle.disconnected = True  # the application's answer is dropped
            cycle.message_event.set()
        self._deaf = True
        delay = self._server.refusals.record(self._address(), self.loop.time()) if asked else 0.0
        if delay:
            self.loop.call_later(delay, self._close_with, _response(error))
        else:
            self._close_with(_response(error) if asked else b"")

    def _close_with(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()

    def _address(self) -> str:
        return address_group(self.client[0]) if self.client else ""

    def _refuse_head(self) -> None:
        if not self.headers and len(self.url) > self._limits.max_url_bytes:
            limit = self._limits.max_url_bytes
            self.refuse(ApiError(414, f"the request target has more than {limit} bytes"), "url_bytes")
        else:
            limit = self._limits.max_header_bytes
            self.refuse(ApiError(431, f"the request head has more than {limit} bytes"), "header_bytes")

    def _evicted(self) -> None:
        self._server.count("connections")
        self.transport.abort()


def _response(error: ApiError) -> bytes:
    body = json.dumps(error.body()).encode()
    headers = {"content-type": "application/json", **error.headers(), "content-length": str(len(body))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINE[error.status] + lines.encode() + b"connection: close\r\n\r\n" + body


def _bound_unsent(transport: asyncio.Transport) -> None:
    """Without a bound the kernel takes megabytes for a client that reads nothing, and nobody notices."""
    connected = transport.get_extra_info("socket")
    if connected is not None and connected.family != socket.AF_UNIX and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
