"""Who sends a request, and how soon it is wanted. Made by api/caller.py, read by the service."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.serve.tenants.keys import LANES, Client
from tokenmill.types import AdapterRef, KvLease


@dataclass(frozen=True, slots=True)
class PageMoves:
    """Where the pages of a request's prompt come from or go to, as its body says. False: nowhere."""

    source: KvLease | None = None
    publishes: KvLease | None = None
    salt: bytes | None = None  # under which they are named on the other side; None: as for any request

    def __bool__(self) -> bool:
        return self.source is not None or self.publishes is not None


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a request, and its priority."""

    client: Client
    priority: int = 0
    lane: str | None = None
    deadline: float | None = None  # seconds to the first token
    cache_salt: str = ""  # of the request; combined with that of the key
    adapter: AdapterRef | None = None  # that the request names as its model
    request_id: str = ""  # as the response header has it
    received: float | None = None  # when its exchange began, on the monotonic clock
    resumes: tuple[int, ...] = ()  # tokens of an answer that began elsewhere
    moves: PageMoves = PageMoves()

    @property
    def rank(self) -> int:
        lanes = (self.client.lane, self.lane or self.client.lane)
        return self.priority + max(LANES[lane] for lane in lanes)  # a batch key cannot promote itself
