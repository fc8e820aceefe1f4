"""Least wait: the replica whose first token is expected soonest, by seconds that the replicas measured themselves.

What is queued there, what of the prompt is not cached there and the wait for a slot are one number, so that a cached
prefix is worth exactly the time it saves: a busy owner loses to an idle stranger when that is faster. Replicas within
5 % of the best are equal, and one of them is drawn: a fixed order among equals would send every miss to the first.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from zlib import crc32

from tokenmill.route.policies.base import AnyCandidate, Policy, Sized

_EQUAL = 1.05


class LeastWait(Policy):
    looks_up = True

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, request: Sized, replicas: Sequence[AnyCandidate]) -> AnyCandidate:
        length = request.num_tokens
        waits = [each.wait_seconds(max(1, length - each.matched_tokens(request))) for each in replicas]
        limit = _EQUAL * min(waits)
        near = [each for each, wait in zip(replicas, waits, strict=True) if wait <= limit]
        if len(near) == 1:
            return near[0]
        if request.session:  # the same among the same replicas, and few change place when one comes or goes
            return max(near, key=lambda each: crc32(f"{each.number} {request.session}".encode()))
        return self._random.choice(near)
