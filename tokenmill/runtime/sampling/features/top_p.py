"""Top-p (nucleus): the smallest set of most likely tokens whose mass reaches p."""

from __future__ import annotations

from tokenmill.runtime.sampling.features.base import Candidates, Filter
from tokenmill.types import SamplingParams


class TopP(Filter):
    def active(self, params: SamplingParams) -> bool:
        return params.top_p < 1.0

    def keep(self, candidates: Candidates, params: SamplingParams) -> int | None:
        mass = candidates.probabilities.cumsum(-1)
        count = int((mass < params.top_p).sum()) + 1
        if count > len(mass):
            return len(mass) if candidates.complete else None
        return count
