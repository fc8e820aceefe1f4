"""Prefix aware: the replica that has most of the prompt in its cache, unless it is too busy.

Short matches do not count, and neither does a replica with many more requests than the least loaded one: then the least
loaded one takes the request (and caches the prefix as well).
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.route.policies.base import AnyCandidate, Policy, Sized
from tokenmill.route.policies.least_loaded import load

_LEAST_MATCH = 0.1  # of the prompt
_MORE_REQUESTS = 8  # than the idlest replica, and
_TIMES_AS_MANY = 1.5


class PrefixAware(Policy):
    looks_up = True

    def choose(self, request: Sized, replicas: Sequence[AnyCandidate]) -> AnyCandidate:
        idlest = min(replicas, key=load)
        matches = [(replica.matched_tokens(request), replica) for replica in replicas]
        most = max(tokens for tokens, _ in matches)
        if most < _LEAST_MATCH * request.num_tokens:
            return idlest
        best = min((replica for tokens, replica in matches if tokens == most), key=load)
        crowded = max(_TIMES_AS_MANY * idlest.outstanding, idlest.outstanding + _MORE_REQUESTS)
        return idlest if best.outstanding > crowded else best
