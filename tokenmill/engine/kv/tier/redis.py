"""Redis as a tier: servers that run the same model share prefixes through it.

Entries have the same header and checksum as on disk, and expire after a week without use. A server that fails is left
alone for a while and pages are computed instead; the engine thread never talks to it. Two connections, so that a long
write does not delay a read.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from tokenmill.engine.kv.tier.base import PageTier
from tokenmill.engine.kv.tier.entry import (
    CorruptEntryError,
    ForeignEntryError,
    decode,
    encode_header,
)
from tokenmill.engine.kv.tier.resp import RedisAddress, RedisConnection, RedisError, Reply
from tokenmill.errors import UserError
from tokenmill.log import get_logger

_log = get_logger(__name__)
_TIMEOUT = 2.0
_LOOKUP_TIMEOUT = 0.25
_PAUSE_SECONDS = 10.0
_EXPIRY_SECONDS = 7 * 86_400
_MAX_KNOWN = 1 << 20


class _Line:
    """A connection that is opened when needed and left alone for a while after it failed."""

    def __init__(self, address: RedisAddress, clock: Callable[[], float]) -> None:
        self._address = address
        self._clock = clock
        self._lock = threading.Lock()
        self._connection: RedisConnection | None = None
        self._paused_until = 0.0

    @property
    def paused(self) -> bool:
        return self._clock() < self._paused_until

    def run(self, commands: Sequence[Sequence[bytes | str | memoryview]], timeout: float = _TIMEOUT) -> list[Reply]:
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = RedisConnection(self._address, _TIMEOUT)
                return self._connection.run(commands, timeout)
            except RedisError:
                self._connection = None
                self._paused_until = self._clock() + _PAUSE_SECONDS
                raise

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()


class RedisTier(PageTier):
    name = "redis"
    remote = True

    def __init__(self, url: str, identity: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._address = RedisAddress.parse(url)
        self._identity = identity
        self._reader = _Line(self._address, clock)
        self._writer = _Line(self._address, clock)
        self._known: OrderedDict[bytes, None] = OrderedDict()  # keys that were written or seen, newest last
        try:
            self._reader.run([["PING"]])
        except RedisError as error:
            raise UserError(
                f"Redis at {self._address} cannot be used: {error}", "start it, or leave --kv-redis out"
            ) from None

    def holds(self, key: bytes) -> bool:
        return key in self._known

    def has(self, keys: list[bytes]) -> list[bool]:
        if not keys or self._reader.paused:
            return [False] * len(keys)
        try:
            found = self._reader.run([["EXISTS", self._name(key)] for key in keys], _LOOKUP_TIMEOUT)
        except RedisError as error:
            self._failed("look pages up", error)
            return [False] * len(keys)
        for key, there in zip(keys, found, strict=True):
            if not there:
                self._known.pop(key, None)
        return [there == 1 for there in found]

    def get(self, key: bytes) -> memoryview | None:
        if self._reader.paused:
            return None
        name = self._name(key)
        try:
            data = self._reader.run([["GET", name], ["EXPIRE", name, str(_EXPIRY_SECONDS)]])[0]
        except RedisError as error:
            self._failed("read", error)
            return None
        if not isinstance(data, bytearray):
            self.stats.misses += 1
            self._known.pop(key, None)
            return None
        try:
            page = decode(data, self._identity, key)
        except (CorruptEntryError, ForeignEntryError) as error:
            self._reject(key, isinstance(error, CorruptEntryError))
            return None
        self._learn(key)
        self.stats.hits += 1
        self.stats.read_bytes += page.nbytes
        return page

    def put(self, key: bytes, data: memoryview) -> None:
        if self._writer.paused:
            return
        entry = bytearray(encode_header(self._identity, key, data))
        entry += data
        expiry = ("EX", str(_EXPIRY_SECONDS))
        command: list[bytes | str | memoryview] = ["SET", self._name(key), memoryview(entry), "NX", *expiry]
        try:
            written = self._writer.run([command])[0]
        except RedisError as error:
            self._failed("write", error)
            return
        self._learn(key)
        if written is not None:  # else it was there already
            self.stats.written_bytes += data.nbytes

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _name(self, key: bytes) -> bytes:
        return b"tokenmill:kv:" + self._identity.hex().encode() + b":" + key.hex().encode()

    def _learn(self, key: bytes) -> None:
        self._known[key] = None
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        self.stats.entries = len(self._known)  # that this engine knows of

    def _reject(self, key: bytes, corrupt: bool) -> None:
        self.stats.corrupt += corrupt
        self.stats.foreign += not corrupt
        self._known.pop(key, None)
        _log.warning("redis tier: an entry is %s and is deleted", "corrupt" if corrupt else "another model's")
        try:
            self._reader.run([["DEL", self._name(key)]])
        except RedisError as error:
            self._failed("delete", error)

    def _failed(self, what: str, error: RedisError) -> None:
        self.stats.failures += 1
        _log.warning(
            "redis tier: %s cannot %s (%s); pages are computed instead, next try in %.0f s",
            self._address,
            what,
            error,
            _PAUSE_SECONDS,
        )
