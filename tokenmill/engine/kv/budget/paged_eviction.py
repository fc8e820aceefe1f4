"""PagedEviction: gives up whole pages with the least mean importance, where a token's is |value| / |key|.

Both are norms over a head, averaged over heads and layers, as in the paper; a page never changes once it is full, so
each is scored once and no kernel is touched. Sinks and the last page are kept (the paper keeps the last page only).
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.engine.kv.budget.base import NORMS, BudgetPolicy, lowest


class PagedEviction(BudgetPolicy):
    score = NORMS

    def choose(self, candidates: range, excess: int, scores: Sequence[float]) -> Sequence[int]:
        return lowest(candidates, excess, scores)
