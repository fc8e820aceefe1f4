"""Round robin: each replica in turn, whatever it has to do."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.route.policies.base import AnyCandidate, Policy, Sized


class RoundRobin(Policy):
    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Sized, replicas: Sequence[AnyCandidate]) -> AnyCandidate:  # noqa: ARG002
        self._next += 1
        return replicas[(self._next - 1) % len(replicas)]
