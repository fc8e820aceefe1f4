"""As much of the Redis protocol (RESP2) as a page tier needs: pipelined commands on one socket, with a deadline.

One caller at a time; the tier guards it. A connection that fails is closed and must be opened anew. Knows commands and
replies, nothing of pages.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from tokenmill.errors import UserError

Reply = bytearray | int | str | None
_MAX_BULK = 1 << 30


class RedisError(Exception):
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


class RedisConnection:
    def __init__(self, address: RedisAddress, timeout: float) -> None:
        self._timeout = timeout
        self._buffer = bytearray()
        self._begin = 0  # of what has not been read yet in the buffer
        try:
            self._socket = socket.create_connection((address.host, address.port), timeout)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if address.encrypted:
                self._socket = ssl.create_default_context().wrap_socket(self._socket, server_hostname=address.host)
        except OSError as error:
            raise RedisError(str(error)) from None
        opening: list[list[bytes | str]] = []
        if address.password:
            opening.append(["AUTH", *([address.user] if address.user else []), address.password])
        if address.database:
            opening.append(["SELECT", str(address.database)])
        self.run([*opening, ["PING"]])

    def run(self, commands: Sequence[Sequence[bytes | str | memoryview]], timeout: float | None = None) -> list[Reply]:
        """Send all commands, then read all replies. Raises RedisError, after which the connection is closed."""
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        try:
            for command in commands:
                self._send(command, deadline)
            return [self._reply(deadline) for _ in commands]
        except (OSError, RedisError, ValueError) as error:
            self.close()
            raise RedisError(str(error) or type(error).__name__) from None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def _send(self, command: Sequence[bytes | str | memoryview], deadline: float) -> None:
        parts = [part.encode() if isinstance(part, str) else part for part in command]
        self._arm(deadline)
        head = bytearray(b"*%d\r\n" % len(parts))
        for part in parts:
            head += b"$%d\r\n" % len(part)
            if len(part) < 4096:
                head += part
            else:  # a page goes out from where it lies
                self._socket.sendall(head)
                self._socket.sendall(part)
                head.clear()
            head += b"\r\n"
        self._socket.sendall(head)

    def _reply(self, deadline: float) -> Reply:
        line = self._line(deadline)
        kind, rest = line[:1], line[1:].decode(errors="replace")
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"$":
            length = int(rest)
            return None if length < 0 else self._bulk(length, deadline)
        raise RedisError(rest if kind == b"-" else f"an answer that is not RESP: {line[:40]!r}")

    def _line(self, deadline: float) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._begin)) < 0:
            if len(self._buffer) - self._begin > 65536:
                raise RedisError("an answer that is not RESP")
            self._arm(deadline)
            received = self._socket.recv(65536)
            if not received:
                raise RedisError("the connection was closed")
            del self._buffer[: self._begin]
            self._begin = 0
            self._buffer += received
        line = bytes(self._buffer[self._begin : end])
        self._begin = end + 2
        return line

    def _bulk(self, length: int, deadline: float) -> bytearray:
        if length > _MAX_BULK:
            raise RedisError(f"a value of {length} bytes")
        value = bytearray(length + 2)
        view = memoryview(value)
        have = min(len(value), len(self._buffer) - self._begin)
        view[:have] = self._buffer[self._begin : self._begin + have]
        self._begin += have
        while have < len(value):
            self._arm(deadline)
            received = self._socket.recv_into(view[have:])
            if not received:
                raise RedisError("the connection was closed")
            have += received
        view.release()
        del value[length:]
        return value

    def _arm(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise RedisError("no answer in time")
        self._socket.settimeout(left)
