"""Responses that later requests may continue, per key and bounded by number and size; the oldest go first.

A key sees only its own. What is stored is the conversation up to and including the answer, so a response can be
continued after those before it are gone. Nothing is written to disk: a restart forgets all. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class StoredResponse:
    response: dict[str, Any]  # as the client got it
    given: list[dict[str, Any]]  # the input items of its request
    messages: list[dict[str, Any]]  # the conversation, without instructions; the answer included
    num_bytes: int = 0


class ResponseStore:
    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self.running: dict[tuple[str, str], asyncio.Task[None]] = {}  # in the background, by key and id
        self._by_key: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._num_bytes: dict[str, int] = {}

    def put(self, key: str, stored: StoredResponse) -> None:
        """Keep a response, or replace it; one that alone exceeds the limits is not kept."""
        name = stored.response["id"]
        self.remove(key, name)
        stored.num_bytes = _size(stored.messages) + _size(stored.given) + _size(stored.response)
        responses = self._by_key.setdefault(key, OrderedDict())
        responses[name] = stored
        self._num_bytes[key] = self._num_bytes.get(key, 0) + stored.num_bytes
        while responses and (len(responses) > self._max_responses or self._num_bytes[key] > self._max_bytes):
            self.remove(key, next(iter(responses)))

    def get(self, key: str, name: str) -> StoredResponse | None:
        responses = self._by_key.get(key)
        if responses is None or name not in responses:
            return None
        responses.move_to_end(name)
        return responses[name]

    def remove(self, key: str, name: str) -> bool:
        responses = self._by_key.get(key)
        stored = responses.pop(name, None) if responses is not None else None
        if responses is None or stored is None:
            return False
        self._num_bytes[key] -= stored.num_bytes
        if not responses:
            del self._by_key[key], self._num_bytes[key]
        return True


def _size(value: object) -> int:
    """About what a JSON value takes in memory: of texts shared between responses every holder counts."""
    if isinstance(value, str):
        return 64 + len(value)
    if isinstance(value, dict):
        return 64 + sum(map(_size, value)) + sum(map(_size, value.values()))
    if isinstance(value, list):
        return 64 + sum(map(_size, value))
    return 32
