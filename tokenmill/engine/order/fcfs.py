"""First come, first served. A waiting request never preempts a running one."""

from __future__ import annotations

from tokenmill.engine.order.base import Discipline
from tokenmill.types import Request


class FirstComeFirstServed(Discipline):
    def key(self, request: Request) -> tuple[int, ...]:
        return (request.arrival,)
