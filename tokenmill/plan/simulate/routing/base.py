"""The contract of a router: which replica takes a request. It sees only what a gateway could see at that moment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tokenmill.plan.simulate.replica import Replica
from tokenmill.types import Request


class Router(ABC):
    @abstractmethod
    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        """One of `replicas`, all of which take requests; there is at least one."""
