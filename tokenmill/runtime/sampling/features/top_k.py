"""Top-k: only the k most likely tokens."""

from __future__ import annotations

from tokenmill.runtime.sampling.features.base import Candidates, Filter
from tokenmill.types import SamplingParams


class TopK(Filter):
    def active(self, params: SamplingParams) -> bool:
        return params.top_k > 0

    def keep(self, candidates: Candidates, params: SamplingParams) -> int | None:
        available = len(candidates.probabilities)
        if params.top_k > available and not candidates.complete:
            return None
        return min(params.top_k, available)
