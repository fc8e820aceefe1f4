"""The answer to one caller: started once, whichever replicas it comes from. Plain ASGI."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from starlette.types import Send

from tokenmill.route.stream import DONE
from tokenmill.serve.errors import ApiError

# Of a response, these concern one connection only; the length is said anew.
_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "transfer-encoding",
        "te",
        "trailer",
        "upgrade",
        "proxy-connection",
        "content-length",
        "date",
    )
)
EVENT_STREAM = "text/event-stream"


class CallerAnswer:
    def __init__(self, send: Send, on_accepted: Callable[[], None] = lambda: None) -> None:
        """`on_accepted` is called when a replica has taken the request: its key is valid."""
        self._send = send
        self._on_accepted = on_accepted
        self.status = 0  # once it has started
        self._is_events = False
        self._unsent = b""

    @property
    def started(self) -> bool:
        return self.status != 0

    async def start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        if self.started:
            return
        kept = [(name.encode(), value.encode("latin-1")) for name, value in headers if name.lower() not in _HOP]
        self.status = status
        if status < 400:
            self._on_accepted()
        self._is_events = any(
            name.lower() == b"content-type" and value.startswith(b"text/event-") for name, value in kept
        )
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    async def write(self, data: bytes) -> None:
        """A caller that reads slowly makes this wait, and the wait may be ended by the death of the replica: what was
        not handed over then goes with what comes next."""
        self._unsent += data
        if self._unsent:
            await self._send({"type": "http.response.body", "body": self._unsent, "more_body": True})
            self._unsent = b""

    async def finish(self) -> None:
        body, self._unsent = self._unsent, b""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def whole(self, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
        await self.start(status, headers)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """As a status while nothing was sent, as an event of a stream after that."""
        body = msgspec.json.encode(error.body())
        if not self.started:
            headers = {"content-type": "application/json", **error.headers()}
            await self.whole(error.status, headers.items(), body)
        elif self._is_events:
            await self.write(b"data: " + body + b"\n\n" + DONE)
            await self.finish()
        else:
            raise error  # the connection is closed: the caller sees that something is missing
