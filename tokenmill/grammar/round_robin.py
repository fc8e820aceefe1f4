"""A queue that is fair between keys: keys take turns, and items of one key keep their order.

A key with a thousand items delays another's first one by one turn. Not thread-safe; the compiler of the engine and the
text workers of the server hold their own locks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class RoundRobin(Generic[_Item]):
    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[_Item]] = OrderedDict()  # the first key is next; none is empty

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._queues)

    def count(self, key: str) -> int:
        return len(self._queues.get(key, ()))

    def add(self, key: str, item: _Item) -> None:
        self._queues.setdefault(key, deque()).append(item)

    def take(self, skipped: Container[str] = ()) -> _Item | None:
        """The next item of the key whose turn it is, none of those `skipped`; None where there is none."""
        key = next((key for key in self._queues if key not in skipped), None)
        if key is None:
            return None
        queue = self._queues.pop(key)
        item = queue.popleft()
        if queue:
            self._queues[key] = queue
        return item

    def remove(self, key: str, item: _Item) -> bool:
        """Whether the item was still queued."""
        queue = self._queues.get(key)
        if queue is None or item not in queue:
            return False
        queue.remove(item)
        if not queue:
            del self._queues[key]
        return True
