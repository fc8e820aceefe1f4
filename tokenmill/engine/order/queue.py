"""A sorted queue of requests: membership in O(1), insertion and removal anywhere by binary search.

Keys are given by the scheduler, unique, and kept while the request moves from one queue to another.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from tokenmill.types import Request

Key = tuple[int, ...]


class RequestQueue:
    def __init__(self) -> None:
        self._entries: list[tuple[Key, Request]] = []  # keys are unique, so requests are never compared
        self._keys: dict[Request, Key] = {}

    def add(self, request: Request, key: Key) -> None:
        self._keys[request] = key
        insort(self._entries, (key, request))

    def remove(self, request: Request) -> Key:
        key = self._keys.pop(request)
        del self._entries[bisect_left(self._entries, (key,))]
        return key

    def at(self, index: int) -> Request:
        """The request at this place of the order."""
        return self._entries[index][1]

    def last(self) -> Request:
        return self._entries[-1][1]

    def snapshot(self) -> list[Request]:
        """All requests in order, safe to walk while the queue changes."""
        return [request for _, request in self._entries]

    def __contains__(self, request: Request) -> bool:
        return request in self._keys

    def __len__(self) -> int:
        return len(self._entries)
