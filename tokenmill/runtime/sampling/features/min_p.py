"""Min-p: tokens at least `min_p` times as likely as the most likely one."""

from __future__ import annotations

from tokenmill.runtime.sampling.features.base import Candidates, Filter
from tokenmill.types import SamplingParams


class MinP(Filter):
    def active(self, params: SamplingParams) -> bool:
        return params.min_p > 0.0

    def keep(self, candidates: Candidates, params: SamplingParams) -> int | None:
        probabilities = candidates.probabilities
        count = int((probabilities >= params.min_p * probabilities[0]).sum())
        if count == len(probabilities) and not candidates.complete:
            return None
        return max(1, count)
