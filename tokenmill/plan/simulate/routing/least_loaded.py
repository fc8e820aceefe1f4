"""Least loaded: the replica with the fewest unfinished requests, by tokens among equals."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.plan.simulate.replica import Replica
from tokenmill.plan.simulate.routing.base import Router
from tokenmill.types import Request


def load(replica: Replica) -> tuple[int, int, int]:
    return replica.outstanding, replica.outstanding_tokens, replica.number


class LeastLoaded(Router):
    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:  # noqa: ARG002
        return min(replicas, key=load)
