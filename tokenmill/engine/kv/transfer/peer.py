"""Fetches pages from the engines that computed them, into buffers of its own: the tier called `peer`.

Each load has a thread and a connection: one request for all its pages, which come in order while the other engine still
computes. Key, length and checksum of every page are checked; what is late, lost or wrong ends the load there, and the
rest is computed. Only peers that the operator named are ever connected to. Leases of requests that wait in line are
renewed, and ended when nobody needs them. The TierStack owns it; the engine thread never waits for a peer.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenmill.engine.kv.tier.breaker import CLOSED, Breaker
from tokenmill.engine.kv.tier.load import Load
from tokenmill.engine.kv.transfer import wire
from tokenmill.engine.stats import TierStats
from tokenmill.log import get_logger
from tokenmill.types import KvLease

_log = get_logger(__name__)
NAME = "peer"
_CONNECT_SECONDS = 2.0
_SILENCE_SECONDS = 5.0  # without a page or a sign of life
_KEEPER_SECONDS = 1.0  # between looks at what is to be renewed


@dataclass(eq=False)
class _Held:
    """A lease that a request still needs."""

    lease: KvLease
    renewed: float = field(default_factory=time.monotonic)
    fetching: bool = False  # a load is connected, which renews it


class PeerPages:
    def __init__(
        self, peers: Sequence[str], secret: bytes, identity: bytes, page_bytes: int, timeout: float, maps: bool = True
    ) -> None:
        """`timeout`: seconds until a load is given up. `maps`: read the memory of engines on this host."""
        self.stats = TierStats(NAME)
        self.timeout = timeout
        self.on_wanted: Callable[[str], None] = lambda _request_id: None
        self._breakers = {peer: Breaker() for peer in peers}
        self._secret, self._identity, self._page_bytes = secret, identity, page_bytes
        self._maps = maps
        self._held: dict[str, _Held] = {}
        self._ended: list[KvLease] = []  # to be told to their engines
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._show_state()
        threading.Thread(target=self._keep_all, name="kv-peer-keeper", daemon=True).start()

    # --- engine thread ---

    def allows(self, address: str) -> bool:
        return address in self._breakers

    def hold(self, lease: KvLease) -> None:
        """A request waits that will fetch the pages of this lease."""
        if self.allows(lease.address):
            with self._lock:
                self._held.setdefault(lease.name, _Held(lease))

    def release(self, lease: KvLease) -> None:
        """Nobody needs the pages of this lease any more. While a load fetches them, that tells the peer itself."""
        with self._lock:
            held = self._held.get(lease.name)
            if held is not None and not held.fetching:
                del self._held[lease.name]
                self._ended.append(lease)
        self._wake.set()

    def start(self, load: Load, lease: KvLease) -> None:
        """Fetch the keys of a load, in order."""
        load.limit = self.timeout + _SILENCE_SECONDS  # the thread gives up before
        with self._lock:
            self._held.setdefault(lease.name, _Held(lease)).fetching = True
        threading.Thread(target=self._fetch, args=(load, lease), name="kv-peer", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    # --- a load's thread ---

    def _fetch(self, load: Load, lease: KvLease) -> None:
        breaker = self._breakers[lease.address]
        began = time.monotonic()
        connection: socket.socket | None = None
        try:
            if not breaker.allow():
                load.fail("unreachable")
                return
            try:
                connection = self._connect(lease.address, load)
                where = wire.log_in(connection, self._secret, self._identity)
            except (OSError, wire.WireError) as error:
                if not load.cancelled or breaker.state != CLOSED:  # else it is we who hung up
                    self._failed(lease.address, str(error) or type(error).__name__)
                load.fail(error.reason if isinstance(error, wire.WireError) else "unreachable")
                return
            self._succeeded(lease.address)
            self._receive(connection, where, load, lease, began + self.timeout)
        except wire.WireError as error:
            with self._lock:
                self.stats.reject(error.reason)
            load.fail(error.reason)
        except OSError as error:  # TimeoutError is one too
            with self._lock:
                self.stats.failures += not load.cancelled
            load.fail("timeout" if isinstance(error, TimeoutError) else "lost")
        except Exception:
            _log.exception("KV pages could not be fetched from %s", lease.address)
            load.fail("lost")
        finally:
            self._finish(connection, load, lease, time.monotonic() - began)

    def _connect(self, address: str, load: Load) -> socket.socket:
        connection = socket.create_connection(wire.parse_address(address), _CONNECT_SECONDS)
        connection.settimeout(_SILENCE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        load.interrupt = lambda: _shut(connection)
        if load.cancelled:
            _shut(connection)
        return connection

    def _receive(
        self, connection: socket.socket, where: wire.Mapping, load: Load, lease: KvLease, deadline: float
    ) -> None:
        """Pages until all are there. Raises WireError or OSError where they do not come, or not as they should."""
        memory = _mapped(where) if self._maps else None
        request = wire.encode_get(lease.name, load.keys, memory is not None)
        wire.send_frame(connection, wire.GET, request)
        try:
            for key in load.keys:
                page = self._page(connection, memory, key, deadline, load)
                if page is None:
                    return
                load.pages[key], load.tiers[key] = page, NAME
            with contextlib.suppress(OSError, wire.WireError):
                wire.read_control(connection, wire.END, 0)  # a line with unread data is reset, and `done` lost
        finally:
            if memory is not None:
                memory.close()

    def _page(
        self, connection: socket.socket, memory: mmap.mmap | None, key: bytes, deadline: float, load: Load
    ) -> memoryview | None:
        """The next page, in a buffer that nobody else has; None where the peer says that it does not come."""
        while True:
            if time.monotonic() > deadline:
                raise TimeoutError
            kind, size = wire.read_head(connection)
            if kind == wire.WAIT and not size:
                continue
            if kind == wire.END and size <= wire.MAX_LEASE:
                load.fail(wire.read_exactly(connection, size).decode("ascii", "replace") or "protocol")
                return None
            break
        if kind == wire.SLOT and memory is not None and size == wire.SLOT_BYTES:
            head = wire.read_exactly(connection, size)
            at = wire.decode_offset(head)
            if at + self._page_bytes > len(memory):
                raise wire.WireError("length")
            page = memoryview(bytearray(memoryview(memory)[at : at + self._page_bytes]))
        elif kind == wire.PAGE and memory is None and size == wire.HEAD_BYTES + self._page_bytes:
            head = wire.read_exactly(connection, wire.HEAD_BYTES)
            page = memoryview(bytearray(self._page_bytes))
            wire.read_into(connection, page)
        else:
            raise wire.WireError("protocol" if kind not in (wire.PAGE, wire.SLOT) else "length")
        found, crc = wire.decode_head(head)
        if found != key:
            raise wire.WireError("name")
        if wire.checksum(key, page) != crc:
            raise wire.WireError("hash")
        return page

    def _finish(self, connection: socket.socket | None, load: Load, lease: KvLease, seconds: float) -> None:
        """Tell the peer, by this connection or later by another, and the engine."""
        told = False
        if connection is not None:
            with contextlib.suppress(OSError):
                wire.send_frame(connection, wire.DONE, lease.name.encode())
                told = True
            connection.close()
        with self._lock:
            self._held.pop(lease.name, None)
            if not told:
                self._ended.append(lease)
            num_bytes = sum(page.nbytes for page in load.pages.values())
            self.stats.hits += len(load.pages)
            self.stats.misses += len(load.keys) - len(load.pages)
            self.stats.read_bytes += num_bytes
            if load.pages:
                self.stats.read_bandwidth = num_bytes / max(seconds, 1e-9)
        load.interrupt = lambda: None
        load.done.set()

    # --- the keeper's thread ---

    def _keep_all(self) -> None:
        """Renew the leases of requests that wait in line, and end those that nobody needs. A peer that cannot be
        reached is not asked again: its leases end by themselves."""
        while not self._closed:
            self._wake.wait(_KEEPER_SECONDS)
            self._wake.clear()
            now = time.monotonic()
            with self._lock:
                ended, self._ended = self._ended, []
                due = [
                    held for held in self._held.values()
                    if not held.fetching and now - held.renewed > held.lease.ttl / 3
                ]  # fmt: skip
                for held in due:
                    held.renewed = now
            messages = [(lease, wire.DONE) for lease in ended] + [(held.lease, wire.RENEW) for held in due]
            for address in {lease.address for lease, _ in messages}:
                self._tell(address, [(lease, kind) for lease, kind in messages if lease.address == address])

    def _tell(self, address: str, messages: list[tuple[KvLease, int]]) -> None:
        if not self._breakers[address].ready:
            return
        try:
            with socket.create_connection(wire.parse_address(address), _CONNECT_SECONDS) as connection:
                connection.settimeout(_SILENCE_SECONDS)
                wire.log_in(connection, self._secret, self._identity)
                for lease, kind in messages:
                    wire.send_frame(connection, kind, lease.name.encode())
        except (OSError, wire.WireError) as error:
            _log.info("%s: leases were not renewed or ended: %s", address, error)

    # --- state ---

    def _failed(self, address: str, why: str) -> None:
        with self._lock:
            self.stats.failures += 1
        breaker = self._breakers[address]
        pause = breaker.pause
        if breaker.failed():
            _log.warning("peer %s: %s; prompts are computed here, next try in %.0f s", address, why, pause)
        self._show_state()

    def _succeeded(self, address: str) -> None:
        if self._breakers[address].succeeded():
            _log.warning("peer %s: can be reached again", address)
        self._show_state()

    def _show_state(self) -> None:
        self.stats.up = int(any(breaker.state == CLOSED for breaker in self._breakers.values()))


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _mapped(where: wire.Mapping) -> mmap.mmap | None:
    """The memory of an engine on this host, read-only; None where it cannot be had, and pages come by the socket."""
    if where.pid <= 0:
        return None
    try:
        descriptor = os.open(f"/proc/{where.pid}/fd/{where.descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if status.st_ino != where.inode or not stat.S_ISREG(status.st_mode) or not status.st_size:
            return None
        return mmap.mmap(descriptor, status.st_size, prot=mmap.PROT_READ)
    except OSError:
        return None
    finally:
        os.close(descriptor)
