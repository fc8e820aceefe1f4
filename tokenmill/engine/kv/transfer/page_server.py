"""Answers other engines that fetch pages of their leases: a thread for each connection, none of the engine's own.

It reads the staging memory only, so a slow, hung or hostile client costs its own thread and at most its leases. A page
that is still to be computed is waited for, with a sign of life in between. The engine that computes prompts owns it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from tokenmill.engine.kv.transfer import wire
from tokenmill.engine.kv.transfer.staging import UNKNOWN, Staging
from tokenmill.errors import UserError
from tokenmill.log import get_logger

_log = get_logger(__name__)
_MAX_CONNECTIONS = 256
_HANDSHAKE_SECONDS = 5.0
_SEND_SECONDS = 10.0  # for a client to take a page
_IDLE_SECONDS = 300.0  # between two requests of a client
_WAIT_SECONDS = 0.5  # between two signs of life while a page is waited for
_UNKNOWN_SECONDS = 10.0  # for a lease to be opened: its prompt may still be on its way here
_TICK_SECONDS = 1.0  # between looks for leases whose time is over


class PageServer:
    def __init__(self, address: str, staging: Staging, secret: bytes, identity: bytes) -> None:
        """`address`: HOST:PORT to listen on; port 0 picks a free one."""
        self.staging = staging
        self._secret = secret
        self._identity = identity
        self._listener = _listen(address)
        self._listener.settimeout(_TICK_SECONDS)
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self.refused: dict[str, int] = {}  # clients, by why
        self.sent_bytes = 0
        host, port = self._listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        threading.Thread(target=self._accept, name="kv-page-server", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    # --- threads ---

    def _accept(self) -> None:
        while not self._closed:
            self.staging.expire()
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._closed:
                    return
                time.sleep(_TICK_SECONDS)  # such as no descriptors left
                continue
            if self.num_connections >= _MAX_CONNECTIONS:
                connection.close()
                self._refuse("busy")
                continue
            with self._lock:
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="kv-page-client", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_HANDSHAKE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.welcome(connection, self._secret, self._identity, self.staging.mapping)
            connection.settimeout(_IDLE_SECONDS)
            while not self._closed:
                self._answer(connection)
        except wire.WireError as error:
            self._refuse(error.reason)
            _log.info("page server: a client was refused: %s", error)
        except OSError:
            pass  # gone, slow or silent: its leases end by themselves
        except Exception:
            _log.exception("page server: a connection failed")
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket) -> None:
        kind, size = wire.read_head(connection)
        if kind not in (wire.GET, wire.RENEW, wire.DONE) or size > wire.MAX_KEYS * wire.KEY_BYTES:
            raise wire.WireError("protocol", f"a frame of type {kind} and {size} bytes")
        data = wire.read_exactly(connection, size)
        if kind == wire.RENEW:
            self.staging.renew(wire.lease_name(data))
        elif kind == wire.DONE:
            self.staging.done(wire.lease_name(data))
        else:
            connection.settimeout(_SEND_SECONDS)
            self._send_pages(connection, *wire.decode_get(data))
            connection.settimeout(_IDLE_SECONDS)

    def _send_pages(self, connection: socket.socket, lease: str, keys: list[bytes], maps: bool) -> None:
        """In order, up to the first that does not come: what is after it is of no use without it."""
        patience = time.monotonic() + _UNKNOWN_SECONDS
        for key in keys:
            found = self.staging.find(lease, key, _WAIT_SECONDS)
            while found is None or (found == UNKNOWN and time.monotonic() < patience):
                wire.send_frame(connection, wire.WAIT)
                found = self.staging.find(lease, key, _WAIT_SECONDS)
            if isinstance(found, str):
                wire.send_frame(connection, wire.END, found.encode())
                return
            slot, crc = found
            if maps:
                wire.send_frame(connection, wire.SLOT, wire.slot_of(key, crc, slot, self.staging.offset(slot)))
            else:
                wire.send_frame(connection, wire.PAGE, wire.page_head(key, crc), self.staging.page(slot))
                self.sent_bytes += self.staging.page_bytes
        wire.send_frame(connection, wire.END)

    def _refuse(self, reason: str) -> None:
        with self._lock:
            self.refused[reason] = self.refused.get(reason, 0) + 1


def _listen(address: str) -> socket.socket:
    host, port = wire.parse_address(address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        raise UserError(
            f"kv_listen {address} cannot be used: {error.strerror or error}", "give another address or port"
        ) from None
