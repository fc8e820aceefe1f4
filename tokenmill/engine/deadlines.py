"""Deadlines to the first token: which requests have neither started to answer nor time left.

The engine loop asks before each step, so that no step computes a request that nobody waits for any more. Holds ids
only, and those only until the first token; times are of the monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

from tokenmill.errors import UserError
from tokenmill.types import Request


class DeadlineError(UserError):
    def __init__(self) -> None:
        super().__init__("the deadline passed before the first token", "allow more time")


class Deadlines:
    def __init__(self) -> None:
        self._by_id: dict[str, float] = {}
        self._earliest = float("inf")  # no later than the earliest of them

    def add(self, request: Request) -> None:
        if request.deadline is not None:
            self._by_id[request.request_id] = request.deadline
            self._earliest = min(self._earliest, request.deadline)

    def remove(self, request_id: str) -> None:
        """It has its first token, or has ended."""
        self._by_id.pop(request_id, None)

    def take_passed(self, now: float) -> list[str]:
        """The ids whose deadline has passed; they are forgotten here."""
        if now < self._earliest:
            return []
        passed = [request_id for request_id, deadline in self._by_id.items() if deadline <= now]
        for request_id in passed:
            del self._by_id[request_id]
        self._earliest = min(self._by_id.values(), default=float("inf"))
        return passed

    def __len__(self) -> int:
        return len(self._by_id)
