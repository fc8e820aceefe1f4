"""Redis as a tier: servers that run the same model share prefixes through it.

Entries have the same header and checksum as on disk, and expire after a week without use. A server that fails is left
alone for a while and pages are computed instead; the engine thread never talks to it. Reads and writes have connections
of their own, so that a long write does not delay a read. redis-py speaks the protocol (extra `redis`).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from tokenmill.engine.kv.tier.base import PageTier
from tokenmill.engine.kv.tier.entry import (
    CorruptEntryError,
    ForeignEntryError,
    decode,
    encode_header,
)
from tokenmill.errors import UnavailableError, UserError
from tokenmill.log import get_logger

if TYPE_CHECKING:
    from redis import Redis

_log = get_logger(__name__)
_TIMEOUT = 2.0
_LOOKUP_TIMEOUT = 0.25
_PAUSE_SECONDS = 10.0
_EXPIRY_SECONDS = 7 * 86_400
_MAX_KNOWN = 1 << 20

Command = Sequence[bytes | str | memoryview]


class RedisUnavailableError(Exception):
    """The server cannot be reached, does not answer in time, or answers with an error."""


@dataclass(frozen=True, slots=True)
class RedisAddress:
    host: str
    port: int
    database: int = 0
    user: str = ""
    password: str = ""
    encrypted: bool = False

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """redis://[user:password@]host[:port][/database], or rediss:// for TLS."""
        problem = UserError(
            f"kv_redis '{url.rsplit('@', 1)[-1]}' is not an address of Redis", "write it like redis://host:6379/0"
        )
        try:
            parts = urlsplit(url)
            port, database = parts.port or 6379, int(parts.path.strip("/") or 0)
        except ValueError:
            raise problem from None
        if parts.scheme not in ("redis", "rediss") or not parts.hostname or database < 0:
            raise problem
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        return cls(parts.hostname, port, database, user, password, parts.scheme == "rediss")

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.database}"


class RedisClient:
    """Runs commands in one round trip. After a failure the server is left alone for a while, without retries: whoever
    asks computes instead of waiting."""

    def __init__(self, address: RedisAddress, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._clock = clock
        self._lock = threading.Lock()
        self._clients: dict[float, Redis] = {}  # by timeout, each with one connection
        self._paused_until = 0.0

    @property
    def paused(self) -> bool:
        return self._clock() < self._paused_until

    def run(self, commands: Sequence[Command], timeout: float = _TIMEOUT) -> list[Any]:
        """The replies. `timeout` bounds every wait for the server, not their sum."""
        from redis import RedisError

        with self._lock:
            client = self._client(timeout)
            try:
                with client.pipeline(transaction=False) as pipeline:
                    for command in commands:
                        pipeline.execute_command(*command)
                    return pipeline.execute()
            except (RedisError, OSError, ValueError) as error:
                client.connection_pool.disconnect()  # whatever is left in it belongs to another question
                self._paused_until = self._clock() + _PAUSE_SECONDS
                raise RedisUnavailableError(str(error) or type(error).__name__) from None

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.close()

    def _client(self, timeout: float) -> Redis:
        if timeout not in self._clients:
            from redis import Redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry

            self._clients[timeout] = Redis(
                self._address.host,
                self._address.port,
                self._address.database,
                username=self._address.user or None,
                password=self._address.password or None,
                ssl=self._address.encrypted,
                socket_timeout=timeout,
                socket_connect_timeout=_TIMEOUT,
                retry=Retry(NoBackoff(), 0),
                max_connections=1,
                protocol=2,
            )
        return self._clients[timeout]


class RedisTier(PageTier):
    name = "redis"
    remote = True

    def __init__(self, url: str, identity: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._address = RedisAddress.parse(url)
        self._identity = identity
        _check_installed()
        self._reader = RedisClient(self._address, clock)
        self._writer = RedisClient(self._address, clock)
        self._known: OrderedDict[bytes, None] = OrderedDict()  # keys that were written or seen, newest last
        try:
            self._reader.run([["PING"]])
        except RedisUnavailableError as error:
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
        except RedisUnavailableError as error:
            self._failed("look pages up", error)
            return [False] * len(keys)
        for key, there in zip(keys, found, strict=True):
            if not there:
                self._known.pop(key, None)
        return [bool(there) for there in found]

    def get(self, key: bytes) -> memoryview | None:
        if self._reader.paused:
            return None
        name = self._name(key)
        try:
            data = self._reader.run([["GET", name], ["EXPIRE", name, str(_EXPIRY_SECONDS)]])[0]
        except RedisUnavailableError as error:
            self._failed("read", error)
            return None
        if not isinstance(data, bytes):
            self.stats.misses += 1
            self._known.pop(key, None)
            return None
        try:
            page = decode(bytearray(data), self._identity, key)  # writable, as torch wants it
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
        try:
            written = self._writer.run([("SET", self._name(key), memoryview(entry), "NX", *expiry)])[0]
        except RedisUnavailableError as error:
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
        except RedisUnavailableError as error:
            self._failed("delete", error)

    def _failed(self, what: str, error: RedisUnavailableError) -> None:
        self.stats.failures += 1
        _log.warning(
            "redis tier: %s cannot %s (%s); pages are computed instead, next try in %.0f s",
            self._address,
            what,
            error,
            _PAUSE_SECONDS,
        )


def _check_installed() -> None:
    try:
        import redis  # noqa: F401
    except ImportError:
        raise UnavailableError("--kv-redis needs the package redis", "pip install 'tokenmill[redis]'") from None
