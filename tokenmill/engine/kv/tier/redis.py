"""Redis as a tier: servers that run the same model and have the same secret share prefixes through it.

Entries have the same header and keyed hash as on disk, and expire after a week without use. Whatever the server does
(down, slow, an error, a reply that makes no sense) is a failure for the breaker in guard.py. Reads and writes have
connections of their own, so that a long write does not delay a read. redis-py speaks the protocol (extra `redis`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from tokenmill.engine.kv.tier.base import PageTier, TierUnavailableError
from tokenmill.engine.kv.tier.entry import EntryCodec, RejectedEntryError
from tokenmill.errors import UnavailableError, UserError
from tokenmill.log import get_logger

if TYPE_CHECKING:
    from redis import Redis

_log = get_logger(__name__)
_TIMEOUT = 1.5  # to connect, and for each wait for data
_LOOKUP_TIMEOUT = 0.25
_EXPIRY_SECONDS = 7 * 86_400
_MAX_KNOWN = 1 << 20

Command = Sequence[bytes | str | memoryview]


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
    """Runs commands in one round trip, without retries: whoever asks computes instead of waiting."""

    def __init__(self, address: RedisAddress) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._clients: dict[float, Redis] = {}  # by timeout, each with one connection

    def run(self, commands: Sequence[Command], timeout: float = _TIMEOUT) -> list[Any]:
        """The replies. `timeout` bounds every wait for the server, not their sum. Raises TierUnavailableError."""
        with self._lock:
            client = self._client(timeout)
            try:
                with client.pipeline(transaction=False) as pipeline:
                    for command in commands:
                        pipeline.execute_command(*command)
                    replies = pipeline.execute()
            except Exception as error:  # also what noise makes of redis-py's parser: RecursionError, IndexError, ...
                self._disconnect(client)  # what is left in the connection belongs to another question
                raise TierUnavailableError(str(error) or type(error).__name__) from None
            if len(replies) != len(commands):
                self._disconnect(client)
                raise TierUnavailableError(f"{len(replies)} replies to {len(commands)} commands")
            return replies

    def interrupt(self) -> None:
        """Cut the connections under a call that another thread is in: it then fails instead of waiting."""
        for client in list(self._clients.values()):
            self._disconnect(client)

    def close(self) -> None:
        self.interrupt()
        with self._lock:
            for client in self._clients.values():
                with contextlib.suppress(Exception):
                    client.close()

    @staticmethod
    def _disconnect(client: Redis) -> None:
        with contextlib.suppress(Exception):
            client.connection_pool.disconnect()

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

    def __init__(self, url: str, identity: bytes, page_bytes: int, secret: bytes) -> None:
        """`identity`: of the model, KV dtype and layout whose pages these are."""
        super().__init__()
        _check_installed()
        self._codec = EntryCodec(secret, identity, page_bytes)
        self._prefix = b"tokenmill:kv:" + self._codec.namespace.hex().encode() + b":"
        self._address = RedisAddress.parse(url)
        self._reader = RedisClient(self._address)
        self._writer = RedisClient(self._address)
        self._known: OrderedDict[bytes, None] = OrderedDict()  # keys that were written or seen, newest last

    def open(self) -> None:
        self._reader.run([["PING"]])

    def holds(self, key: bytes) -> bool:
        return key in self._known

    def has(self, keys: list[bytes]) -> list[bool]:
        found = self._reader.run([["EXISTS", self._name(key)] for key in keys], _LOOKUP_TIMEOUT)
        if not all(isinstance(there, int) for there in found):
            raise TierUnavailableError("a reply to EXISTS is not a number")
        for key, there in zip(keys, found, strict=True):
            if not there:
                self._known.pop(key, None)
        return [bool(there) for there in found]

    def get(self, key: bytes) -> memoryview | None:
        name = self._name(key)
        last = str(self._codec.entry_bytes)  # one byte more than an entry has: a longer value shows, and is not read
        commands: list[Command] = [("GETRANGE", name, "0", last), ("EXPIRE", name, str(_EXPIRY_SECONDS))]
        try:
            data = self._reader.run(commands)[0]
        except TierUnavailableError as error:
            if "WRONGTYPE" not in str(error):
                raise
            self._reject(key, "type")
            return None
        if not isinstance(data, bytes):
            raise TierUnavailableError("a reply to GETRANGE is not a string")
        if not data:
            self.stats.misses += 1
            self._known.pop(key, None)
            return None
        try:
            page = self._codec.decode(bytearray(data), key)  # writable, as torch wants it
        except RejectedEntryError as error:
            self._reject(key, error.reason)
            return None
        self._learn(key)
        self.stats.hits += 1
        self.stats.read_bytes += page.nbytes
        return page

    def put(self, key: bytes, data: memoryview) -> None:
        entry = bytearray(self._codec.header(key, data))
        entry += data
        expiry = ("EX", str(_EXPIRY_SECONDS))
        written = self._writer.run([("SET", self._name(key), memoryview(entry), "NX", *expiry)])[0]
        self._learn(key)
        if written is not None:  # else it was there already
            self.stats.written_bytes += data.nbytes

    def interrupt(self) -> None:
        self._reader.interrupt()
        self._writer.interrupt()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _learn(self, key: bytes) -> None:
        self._known[key] = None
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        self.stats.entries = len(self._known)  # that this engine knows of

    def _reject(self, key: bytes, reason: str) -> None:
        """The name is in our own namespace, so the entry is ours to delete."""
        self.stats.reject(reason)
        self._known.pop(key, None)
        _log.warning("redis tier: an entry is rejected (%s) and deleted", reason)
        self._reader.run([["DEL", self._name(key)]])


def _check_installed() -> None:
    try:
        import redis  # noqa: F401
    except ImportError:
        raise UnavailableError("--kv-redis needs the package redis", "pip install 'tokenmill[redis]'") from None
