"""Bookkeeping of client connections before anybody is authenticated: how many may be open, and how slow each may be.

`ConnectionTable` decides who may connect: in all and per remote address, with a reserve for health probes.
`TransferClock` measures one connection: time to send a request, rate of its body, progress of what is written to it.
Both are plain arithmetic: no sockets, no event loop, no clock of their own. Used by http_protocol.py and http.py.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

PROBE_RESERVE = 32  # connections beyond the limit that may only ask for /health and the like
_MIN_AGE = 1.0  # seconds: a connection younger than this is not closed in favour of a newer one
_BODY_GRACE = 10.0  # seconds of a body before its rate counts
_LINGER = 5.0  # seconds to read, and drop, the rest of a body whose request is already answered


class Phase(Enum):
    """What a connection waits for."""

    HEAD = "head"  # the request line and headers
    BODY = "body"
    RESPONSE = "response"  # the application
    IDLE = "idle"  # the next request


@dataclass(slots=True, eq=False)
class Slot:
    """One open connection. `trusted`: a request with a valid key came over it, or the server has no keys."""

    address: str  # "" for a Unix socket
    close: Callable[[], None]
    opened: float
    probe_only: bool = False
    trusted: bool = False


class ConnectionTable:
    """Open connections. A full table makes room by closing the oldest one that never brought a valid request; where
    there is none, the new connection may only ask for probe paths."""

    def __init__(self, max_connections: int, max_per_address: int) -> None:
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        self._slots: dict[Slot, None] = {}  # without the reserve, in order of arrival
        self._by_address: dict[str, dict[Slot, None]] = defaultdict(dict)
        self._untrusted: dict[Slot, None] = {}
        self._probes: dict[Slot, None] = {}

    def __len__(self) -> int:
        return len(self._slots) + len(self._probes)

    def admit(self, address: str, close: Callable[[], None], now: float) -> Slot:
        """A slot for a new connection. May close another one through its `close`."""
        slot = Slot(address, close, now)
        if address and len(self._by_address.get(address, ())) >= self._max_per_address:
            slot.probe_only = not self._evict(self._by_address[address], now)
        if not slot.probe_only and len(self._slots) >= self._max_connections:
            slot.probe_only = not self._evict(self._untrusted, now)
        if slot.probe_only:
            if len(self._probes) >= PROBE_RESERVE:
                self._drop(next(iter(self._probes)))
            self._probes[slot] = None
            return slot
        self._slots[slot] = self._untrusted[slot] = None
        if address:
            self._by_address[address][slot] = None
        return slot

    def trust(self, slot: Slot) -> None:
        slot.trusted = True
        self._untrusted.pop(slot, None)

    def release(self, slot: Slot) -> None:
        """The connection is gone. May be called twice."""
        self._probes.pop(slot, None)
        self._slots.pop(slot, None)
        self._untrusted.pop(slot, None)
        peers = self._by_address.get(slot.address)
        if peers is not None:
            peers.pop(slot, None)
            if not peers:
                del self._by_address[slot.address]

    def _evict(self, among: dict[Slot, None], now: float) -> bool:
        for slot in among:
            if now - slot.opened < _MIN_AGE:
                return False  # all later ones are younger
            if not slot.trusted:
                self._drop(slot)
                return True
        return False

    def _drop(self, slot: Slot) -> None:
        self.release(slot)
        slot.close()


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Seconds and bytes per second; 0 is no limit."""

    header_timeout: float
    body_timeout: float
    min_body_rate: int
    keep_alive_timeout: float
    write_timeout: float

    def interval(self) -> float:
        """Seconds between two checks of a connection, so that an exceeded limit is noticed soon."""
        timeouts = (self.header_timeout, self.body_timeout, self.keep_alive_timeout, self.write_timeout)
        return max(0.1, min([1.0, *(each / 4 for each in timeouts if each)]))


@dataclass(slots=True)
class TransferClock:
    """Time that one connection has spent in its phase. `tick` adds to it, so a frozen host counts for one tick only."""

    limits: TransferLimits
    phase: Phase = Phase.HEAD
    num_body_bytes: int = 0
    _in_phase: float = 0.0
    _unwritten: int = 0
    _stalled: float = field(default=0.0)

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self._in_phase = 0.0
        if phase is Phase.BODY:
            self.num_body_bytes = 0

    def tick(self, seconds: float, *, reading: bool, answered: bool, unwritten: int) -> str | None:
        """The limit that has now been exceeded, or None. `reading`: bytes are being taken from the socket; `answered`:
        the response to this request is complete; `unwritten`: bytes in the send buffer."""
        if self._write_stalled(seconds, unwritten):
            return "write_timeout"
        if self.phase is Phase.RESPONSE or (self.phase is Phase.BODY and not reading):
            return None
        self._in_phase += seconds
        if self.phase is Phase.HEAD and 0 < self.limits.header_timeout <= self._in_phase:
            return "header_timeout"
        if self.phase is Phase.IDLE and 0 < self.limits.keep_alive_timeout <= self._in_phase:
            return "keep_alive_timeout"
        if self.phase is Phase.BODY:
            if 0 < self.limits.body_timeout <= self._in_phase or (answered and self._in_phase >= _LINGER):
                return "body_timeout"
            if self._in_phase > _BODY_GRACE and self.num_body_bytes < self.limits.min_body_rate * self._in_phase:
                return "min_body_rate"
        return None

    def _write_stalled(self, seconds: float, unwritten: int) -> bool:
        """Whether the client has read nothing for too long: a send buffer that never shrinks and is never empty."""
        progress = unwritten == 0 or unwritten < self._unwritten
        self._stalled = 0.0 if progress else self._stalled + seconds
        self._unwritten = unwritten
        return 0 < self.limits.write_timeout <= self._stalled


def address_group(host: str) -> str:
    """What counts as one remote address: an IPv4 address, or the /64 network that one IPv6 host usually owns."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
