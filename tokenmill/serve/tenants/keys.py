"""API keys: the clients they belong to, their limits and their current use.

Keys are known by their SHA-256 only and never logged; the names of clients are. Rates are token buckets. Clients are
told apart by name: when the keys are replaced while the server runs, a client of the same name keeps its use. Knows
nothing of HTTP; the caller passes the time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import TypeVar

from tokenmill.errors import UserError, unknown_name

_Limit = TypeVar("_Limit", int, float)

# Lane -> added to the priority number: batch requests yield to all interactive ones
LANES = {"interactive": 0, "batch": 1000}
MIN_PRIORITY, MAX_PRIORITY = -100, 100  # of a request body; lower is sooner
PRIVATE_CACHE = "private"

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"[1-9][0-9]{0,5}[smhd]")

# Where several keys share a server, for what an entry leaves out
_QUEUE_SHARE = 0.5
_PINNED_SHARE = 0.5  # of all keys together
_GRAMMAR_SECONDS = 30.0  # per minute


@dataclass(slots=True)
class Bucket:
    """Refills steadily up to one minute's worth."""

    per_minute: float
    level: float = field(init=False)
    updated: float = 0.0

    def __post_init__(self) -> None:
        self.level = self.per_minute

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` is available, at most until the bucket is full."""
        self._refill(now)
        missing = min(amount, self.per_minute) - self.level
        return max(0.0, missing * 60.0 / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """A negative amount is given back."""
        self._refill(now)
        self.level = min(self.per_minute, self.level - amount)

    def resized(self, per_minute: float) -> Bucket:
        """A bucket of another size with the same amount used."""
        bucket = Bucket(per_minute, updated=self.updated)
        bucket.level = per_minute - (self.per_minute - self.level)
        return bucket

    def _refill(self, now: float) -> None:
        passed = max(0.0, now - self.updated) if self.updated else 0.0
        self.level = min(self.per_minute, self.level + passed * self.per_minute / 60.0)
        self.updated = now


@dataclass(slots=True, eq=False)
class Client:
    """Limits and current use of one key. A limit of None has a default that depends on whether there are other keys."""

    name: str = ""
    weight: float = 1.0  # share of the engine and of the queue
    lane: str = "interactive"
    cache: str = PRIVATE_CACHE  # or the name of the group of keys that share their cached prompts
    admin: bool = False  # every right there is
    metrics: bool = False  # may read /metrics and /load
    loads_loras: bool = False  # may load and unload adapters
    kv_transfers: bool = False  # may have KV pages moved between servers (kv_source, kv_publish)
    loras: tuple[str, ...] | None = None  # adapters it may use, names or patterns such as team-*; None: all
    models: tuple[str, ...] = ()  # that it may use, by their own names; none: all
    requests_per_minute: float = 0.0  # 0: no limit
    tokens_per_minute: float = 0.0
    grammar_seconds_per_minute: float | None = None
    max_parallel: int = 0  # HTTP requests; 0: no limit
    max_sequences: int = 0
    max_priority: int | None = None  # most urgent number
    max_queue_share: float | None = None
    max_pinned_share: float | None = None
    max_budget: float = 0.0  # dollars; 0: no limit
    budget_duration: str = ""  # after which it is whole again, such as 30d; empty: never
    owner: str = field(default="", init=False)  # whose files and batches are its own, also after a restart
    num_keys: int = field(default=1, init=False)  # of the server
    withdrawn: bool = field(default=False, init=False)
    num_active: int = field(default=0, init=False)  # HTTP requests
    num_sequences: int = field(default=0, init=False)
    num_waiting: int = field(default=0, init=False)  # prompts without a first token
    waiting_tokens: int = field(default=0, init=False)
    requests: Bucket | None = field(default=None, init=False)
    tokens: Bucket | None = field(default=None, init=False)
    grammar_seconds: Bucket | None = field(default=None, init=False)
    budget_seconds: float = field(default=0.0, init=False)  # of budget_duration; 0: it is never whole again

    def __post_init__(self) -> None:
        self.loras = None if self.loras is None else tuple(self.loras)
        self._check()
        self._fit_buckets()

    @property
    def most_urgent(self) -> int:
        """The lowest priority number that it may ask for."""
        return self._default(self.max_priority, MIN_PRIORITY, 0)

    @property
    def queue_share(self) -> float:
        return self._default(self.max_queue_share, 1.0, _QUEUE_SHARE)

    @property
    def pinned_share(self) -> float:
        return self._default(self.max_pinned_share, 1.0, _PINNED_SHARE / self.num_keys)

    @property
    def sees_metrics(self) -> bool:
        return self.admin or self.metrics or self.num_keys == 1

    @property
    def changes_loras(self) -> bool:
        return self.admin or self.loads_loras or self.num_keys == 1

    @property
    def moves_pages(self) -> bool:
        return self.admin or self.kv_transfers or self.num_keys == 1

    def may_use(self, lora: str) -> bool:
        return self.loras is None or any(fnmatchcase(lora, pattern) for pattern in self.loras)

    @property
    def operates(self) -> bool:
        """Whether it may load, unload and fetch models."""
        return self.admin or self.num_keys == 1

    def charge_grammar(self, seconds: float, now: float) -> None:
        """Time that was spent on compiling a grammar for this key."""
        if self.grammar_seconds is not None:
            self.grammar_seconds.take(seconds, now)

    def adopt(self, other: Client) -> None:
        """Take over the limits of another entry of the same name; what is in use stays counted."""
        for each in fields(Client):
            if each.init:
                setattr(self, each.name, getattr(other, each.name))
        self.owner = other.owner
        self._fit_buckets()

    def share_with(self, num_keys: int) -> None:
        """How many keys the server has: defaults follow from it."""
        self.num_keys = num_keys
        self._fit_buckets()

    def _default(self, value: _Limit | None, alone: _Limit, among_others: _Limit) -> _Limit:
        if value is not None:
            return value
        return alone if self.num_keys == 1 else among_others

    def _fit_buckets(self) -> None:
        self.requests = _fitted(self.requests, self.requests_per_minute)
        self.tokens = _fitted(self.tokens, self.tokens_per_minute)
        seconds = self._default(self.grammar_seconds_per_minute, 0.0, _GRAMMAR_SECONDS)
        self.grammar_seconds = _fitted(self.grammar_seconds, seconds)
        self.budget_seconds = _duration(self.budget_duration)

    def _check(self) -> None:
        if not 0 < self.weight <= 1000:
            raise UserError(f"weight of key '{self.name}' is {self.weight}", "give more than 0, at most 1000")
        if self.lane not in LANES:
            raise unknown_name("lane", self.lane, LANES)
        rates = (self.requests_per_minute, self.tokens_per_minute, self.grammar_seconds_per_minute or 0.0)
        if min(*rates, self.max_parallel, self.max_sequences, self.max_budget) < 0:
            raise UserError(f"a limit of key '{self.name}' is negative", "give 0 for none")
        for what in ("max_queue_share", "max_pinned_share"):
            if not 0 <= (getattr(self, what) or 0.0) <= 1:
                raise UserError(f"{what} of key '{self.name}' is {getattr(self, what)}", "give 0 to 1")
        if not MIN_PRIORITY <= (self.max_priority or 0) <= MAX_PRIORITY:
            raise UserError(
                f"max_priority of key '{self.name}' is {self.max_priority}", f"give {MIN_PRIORITY} to {MAX_PRIORITY}"
            )
        if self.budget_duration and not (self.max_budget and _DURATION.fullmatch(self.budget_duration)):
            problem = f"budget_duration of key '{self.name}' is '{self.budget_duration}'"
            raise UserError(problem, "give it with a max_budget, like 12h or 30d")
        if not all(isinstance(name, str) and name for name in self.models):
            raise UserError(f"models of key '{self.name}' are not names", "give a list of names, or leave it out: all")
        if not self.cache:
            raise UserError(f"cache of key '{self.name}' is empty", "give private, shared or the name of a group")


class KeyRing:
    """All keys. Without any the server is open, and all callers are one client."""

    def __init__(self, entries: Sequence[tuple[bytes, Client]] = ()) -> None:
        """`entries`: the SHA-256 of a key, and its client."""
        self._clients: dict[bytes, tuple[bytes, Client]] = {}
        self._anonymous = Client()
        self.replace(entries)

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def open(self) -> bool:
        return not self._clients

    def find(self, key: str | None) -> Client | None:
        """The client of a key, None if it is unknown. The time depends on neither the number of keys nor how much of
        one was guessed: the table is asked for the digest, which nobody can steer."""
        if self.open:
            return self._anonymous
        digest = digest_of(key or "")
        known, client = self._clients.get(digest, (bytes(len(digest)), None))
        return client if hmac.compare_digest(known, digest) and key else None

    def owned_by(self, owner: str) -> Client | None:
        """The client that this owner is at present; None if it has no key."""
        if self.open:
            return self._anonymous if owner == self._anonymous.owner else None
        return next((client for _, client in self._clients.values() if client.owner == owner), None)

    def with_budget(self) -> str | None:
        """The name of a key that has a budget, if one has."""
        return next((client.name for _, client in self._clients.values() if client.max_budget), None)

    def replace(self, entries: Sequence[tuple[bytes, Client]]) -> list[Client]:
        """Use these keys from now on. Clients of a name that stays keep their use; returns those that are gone."""
        before = {client.name: client for _, client in self._clients.values()}
        clients = {}
        for digest, entry in entries:
            client = before.pop(entry.name, entry)
            if client is not entry:
                client.adopt(entry)
            client.share_with(len(entries))
            clients[digest] = (digest, client)
        self._clients = clients
        for client in before.values():
            client.withdrawn = True
        return list(before.values())


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _duration(text: str) -> float:
    return float(text[:-1]) * _UNITS[text[-1]] if text else 0.0


def _fitted(bucket: Bucket | None, per_minute: float) -> Bucket | None:
    if not per_minute:
        return None
    if bucket is None:
        return Bucket(per_minute)
    return bucket if bucket.per_minute == per_minute else bucket.resized(per_minute)
