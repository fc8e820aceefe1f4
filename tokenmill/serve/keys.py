"""API keys: clients and their quotas. Keys are compared in constant time and never logged; their names are.

Quotas are token buckets per key: requests per minute are charged on arrival, tokens when their number is known, which
may overdraw the bucket. Knows nothing of HTTP; the caller passes the time.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tokenmill.errors import UserError, unknown_name
from tokenmill.serve.config import read_config_file

# Lane -> added to the priority number: batch requests yield to all interactive ones
LANES = {"interactive": 0, "batch": 1000}


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
        self._refill(now)
        self.level -= amount

    def _refill(self, now: float) -> None:
        passed = max(0.0, now - self.updated) if self.updated else 0.0
        self.level = min(self.per_minute, self.level + passed * self.per_minute / 60.0)
        self.updated = now


@dataclass(slots=True, eq=False)
class Client:
    """Quotas and current use of one key."""

    name: str = ""
    weight: float = 1.0
    lane: str = "interactive"
    requests_per_minute: float = 0.0  # 0: no limit
    tokens_per_minute: float = 0.0
    max_parallel: int = 0
    num_active: int = 0
    requests: Bucket | None = None
    tokens: Bucket | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1000:
            raise UserError(f"weight of key '{self.name}' is {self.weight}", "give more than 0, at most 1000")
        if self.lane not in LANES:
            raise unknown_name("lane", self.lane, LANES)
        if min(self.requests_per_minute, self.tokens_per_minute, self.max_parallel) < 0:
            raise UserError(f"a limit of key '{self.name}' is negative", "give 0 for none")
        self.requests = Bucket(self.requests_per_minute) if self.requests_per_minute else None
        self.tokens = Bucket(self.tokens_per_minute) if self.tokens_per_minute else None


class KeyRing:
    """All keys. Empty: the server is open, and all callers are one client."""

    def __init__(self, keys: Sequence[tuple[str, Client]] = ()) -> None:
        self._clients = [(_digest(key), client) for key, client in keys]
        self._anonymous = Client()

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def open(self) -> bool:
        return not self._clients

    def find(self, key: str | None) -> Client | None:
        """The client of a key, None if it is unknown. Compares with every key, so that the time does not depend on the
        outcome."""
        if self.open:
            return self._anonymous
        digest = _digest(key or "")
        match = None
        for known_digest, client in self._clients:
            if hmac.compare_digest(known_digest, digest):
                match = client
        return match if key else None


def load_keys(plain: Sequence[str], path: str) -> KeyRing:
    keys = [(key, Client(f"key-{number}")) for number, key in enumerate(plain, 1)]
    if path:
        keys += _read_keys(path)
    if len({key for key, _ in keys}) < len(keys):
        raise UserError("two API keys are the same", "keep one of them")
    return KeyRing(keys)


def _read_keys(path: str) -> list[tuple[str, Client]]:
    entries = read_config_file(path).get("keys")
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path} has no list of keys", "write `keys:` and under it `- key: ...` with a `name`")
    valid = {"key"} | {each.name for each in fields(Client)} - {"num_active", "requests", "tokens"}
    keys = []
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or not isinstance(entry.get("key"), str) or not entry["key"]:
            raise UserError(f"key {number} in {path} has no `key`", "give it a string")
        values: dict[str, Any] = dict(entry)
        for name in values:
            if name not in valid:
                raise unknown_name("field of a key", str(name), valid)
        key = values.pop("key")
        values.setdefault("name", f"file-key-{number}")
        try:
            keys.append((key, Client(**values)))
        except TypeError:
            raise UserError(f"key {number} in {path} has a field of the wrong type", "correct it") from None
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
