"""Lower priority number first, by arrival within one number.

A waiting request preempts running ones of a worse number when slots or pages lack, never one of its own number. A
steady stream of urgent requests can therefore keep the others waiting: that is what the caller asked for.
"""

from __future__ import annotations

from tokenmill.engine.order.base import Discipline
from tokenmill.types import Request


class PriorityFirst(Discipline):
    def key(self, request: Request) -> tuple[int, ...]:
        return (request.priority, request.arrival)

    def outranks(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority
