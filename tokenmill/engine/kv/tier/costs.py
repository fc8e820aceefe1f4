"""What loading a page costs and what computing it costs, as this engine measured them: moving averages, no constants.

Until something has been measured it counts as free, so that it gets measured. A decision against loading is
revisited at intervals: a disk that was slow may be fast by now.
"""

from __future__ import annotations

from collections.abc import Mapping

_WEIGHT = 0.25  # of a new measurement
_RETRY_EVERY = 20  # refusals
IMPORT = "import"  # the copy into the KV cache, beside the tiers


class MovingAverage:
    def __init__(self) -> None:
        self.value = 0.0  # 0: nothing measured yet

    def add(self, sample: float) -> None:
        self.value = sample if not self.value else self.value + _WEIGHT * (sample - self.value)


class LoadCosts:
    def __init__(self) -> None:
        self._token_seconds = MovingAverage()
        self._byte_seconds: dict[str, MovingAverage] = {}
        self._refusals = 0

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """A step that computed prompts."""
        self._token_seconds.add(seconds / num_tokens)

    def record_load(self, tier: str, num_bytes: int, seconds: float) -> None:
        if num_bytes:
            self._byte_seconds.setdefault(tier, MovingAverage()).add(seconds / num_bytes)

    def bandwidth(self, tier: str) -> float:
        """Bytes per second; 0: not measured."""
        seconds = self._byte_seconds.get(tier, MovingAverage()).value
        return 1.0 / seconds if seconds else 0.0

    def recompute_seconds(self, num_tokens: int) -> float:
        """0: not measured."""
        return num_tokens * self._token_seconds.value

    def worth_loading(self, num_tokens: int, bytes_by_tier: Mapping[str, int]) -> bool:
        total = dict(bytes_by_tier) | {IMPORT: sum(bytes_by_tier.values())}
        seconds = sum(
            num_bytes * self._byte_seconds[tier].value
            for tier, num_bytes in total.items()
            if tier in self._byte_seconds
        )
        recompute = self.recompute_seconds(num_tokens)
        if not recompute or seconds < recompute:
            return True
        self._refusals += 1
        return self._refusals % _RETRY_EVERY == 0
