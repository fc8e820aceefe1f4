"""Wrong keys per remote address: beyond a number per minute they are answered late and with 429.

A valid key is never counted or delayed, so that one client cannot lock out others behind the same address. The table
is bounded: the address that was seen longest ago is forgotten. Knows no HTTP; the caller passes the time.
"""

from __future__ import annotations

from collections import OrderedDict

from tokenmill.serve.tenants.keys import Bucket

DELAY = 1.0  # seconds before a wrong key beyond the limit is answered
_MAX_ADDRESSES = 4096


class WrongKeys:
    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def record(self, address: str, now: float) -> float:
        """Count a wrong key; returns the seconds until this address may try again, 0 while it is within the limit."""
        if not self._per_minute:
            return 0.0
        bucket = self._buckets.get(address)
        if bucket is None:
            bucket = self._buckets[address] = Bucket(float(self._per_minute))
            if len(self._buckets) > _MAX_ADDRESSES:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(address)
        wait = bucket.wait(1.0, now)
        if wait == 0.0:
            bucket.take(1.0, now)
        return wait
