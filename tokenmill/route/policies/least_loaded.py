"""Least loaded: the replica with the fewest unfinished requests, by tokens among equals."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.route.policies.base import AnyCandidate, Candidate, Policy, Sized


def load(replica: Candidate) -> tuple[int, int, int]:
    return replica.outstanding, replica.outstanding_tokens, replica.number


class LeastLoaded(Policy):
    def choose(self, request: Sized, replicas: Sequence[AnyCandidate]) -> AnyCandidate:  # noqa: ARG002
        return min(replicas, key=load)
