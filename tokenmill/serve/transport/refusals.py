"""Requests that are refused, by client: beyond a rate their answers come late. Sending nonsense fast is no attack then.

Reading and refusing a request takes time of the one event loop; a client that waits for its refusals sends fewer. What
is answered with success is never delayed. The table is bounded. Knows no HTTP; the caller passes the time and waits.
"""

from __future__ import annotations

from collections import OrderedDict

_BURST = 2.0  # seconds' worth of refusals that are not delayed
_MAX_DELAY = 10.0
_MAX_CLIENTS = 4096


class Refusals:
    def __init__(self, per_second: float) -> None:
        """0: nothing is delayed."""
        self._cost = 1.0 / per_second if per_second else 0.0
        self._paid: OrderedDict[str, float] = OrderedDict()  # client -> the time until which its refusals are spread

    def record(self, client: str, now: float) -> float:
        """Count a refusal; returns the seconds to wait before it is sent."""
        if not self._cost:
            return 0.0
        paid = max(self._paid.pop(client, 0.0), now - _BURST) + self._cost
        self._paid[client] = min(paid, now + _MAX_DELAY)
        if len(self._paid) > _MAX_CLIENTS:
            self._paid.popitem(last=False)
        return max(0.0, self._paid[client] - now)
