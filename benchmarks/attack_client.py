"""How attackers connect and send: with an address of their own, one by one, at once, or as raw bytes that are left
unanswered. Knows no attack (attack_shapes.py)."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

Statuses = Counter[str]
_PATIENCE = 90.0  # beyond every limit of the server, also on a machine that does other things beside it
_ATTACKER = "127.0.0.66"


@dataclass(frozen=True, slots=True)
class Target:
    url: str
    key: str | None = None

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        return url.host, url.port or 80

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def source(self) -> str | None:
        """Attackers have an address of their own, as they do in the world."""
        return _ATTACKER if sys.platform == "linux" and self.address[0] == "127.0.0.1" else None

    def http(self, timeout: float = _PATIENCE, key: bool = True) -> httpx.Client:
        limits = httpx.Limits(max_connections=None)
        transport = httpx.HTTPTransport(local_address=self.source, limits=limits)
        headers = self.headers if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout, transport=transport)

    def head(self) -> bytes:
        host, port = self.address
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        return f"Host: {host}:{port}\r\n{key}".encode()

    def connect(self, timeout: float = _PATIENCE) -> socket.socket:
        return socket.create_connection(self.address, timeout, (self.source, 0) if self.source else None)


def post(http: httpx.Client, path: str, body: Mapping[str, Any] | bytes) -> str:
    """The status as text, "cut" or "late"."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        answer = http.post(path, content=content, headers={"content-type": "application/json"})
        return str(answer.status_code)
    except httpx.TimeoutException:
        return "late"
    except httpx.HTTPError:
        return "cut"


def at_once(target: Target, path: str, bodies: Iterable[Mapping[str, Any] | bytes]) -> Statuses:
    """All of them at the same time, from one client."""
    statuses: list[str] = []
    with target.http() as http:
        threads = [
            threading.Thread(target=lambda body=body: statuses.append(post(http, path, body))) for body in bodies
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return Counter(statuses)


def in_turn(target: Target, path: str, bodies: Iterable[Mapping[str, Any] | bytes]) -> Statuses:
    with target.http() as http:
        return Counter([post(http, path, body) for body in bodies])


def request_bytes(target: Target, path: str, body: Mapping[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = b"POST %s HTTP/1.1\r\n" % path.encode() + target.head() + b"Content-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(content) + content


@contextlib.contextmanager
def pending(target: Target, path: str, bodies: Iterable[Mapping[str, Any]]) -> Iterator[list[socket.socket]]:
    """Requests that are sent at once and left when the block ends, finished or not. Gives their connections."""
    with contextlib.ExitStack() as stack:
        connections = []
        for body in bodies:
            connections.append(stack.enter_context(target.connect(5.0)))
            connections[-1].sendall(request_bytes(target, path, body))
        yield connections


def answer_to(target: Target, data: bytes, timeout: float = 5.0) -> bytes:
    """What the server says to raw bytes until it closes, or until it is silent for `timeout`."""
    received = b""
    with contextlib.suppress(OSError), target.connect(timeout) as connection:
        connection.sendall(data)
        while chunk := connection.recv(65536):
            received += chunk
    return received
