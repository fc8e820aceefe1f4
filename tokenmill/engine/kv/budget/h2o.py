"""H2O: half of the budget for the last tokens, half for the heavy hitters: pages that got the most attention so far.

A page's score is the attention mass that its tokens received from all queries computed since, summed over heads and
layers: the paper's token scores summed over the page. The prompt must be computed by the request itself (cached pages
would have no score), and steps that hold such a request run op by op, where attention weights can be seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.engine.kv.budget.base import ATTENTION, BudgetPolicy, lowest


class HeavyHitters(BudgetPolicy):
    score = ATTENTION

    def recent(self, budget: int) -> int:
        # At most what leaves one page to choose besides the sinks and the page being written.
        return max(self.num_recent, min(budget // 2, budget - self.num_sinks - 2))

    def choose(self, candidates: range, excess: int, scores: Sequence[float]) -> Sequence[int]:
        return lowest(candidates, excess, scores)
