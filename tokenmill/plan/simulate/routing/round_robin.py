"""Round robin: each replica in turn, whatever it has to do."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.plan.simulate.replica import Replica
from tokenmill.plan.simulate.routing.base import Router
from tokenmill.types import Request


class RoundRobin(Router):
    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:  # noqa: ARG002
        self._next += 1
        return replicas[(self._next - 1) % len(replicas)]
