"""StreamingLLM: the first tokens (attention sinks) and a window of the last ones; what lies between goes, oldest first.

Unlike the paper's cache, keys keep the rotation of their original positions: nothing is rotated again as tokens leave.
Needs no scores, so it works everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.engine.kv.budget.base import BudgetPolicy


class StreamingLLM(BudgetPolicy):
    def choose(self, candidates: range, excess: int, scores: Sequence[float]) -> Sequence[int]:  # noqa: ARG002
        return candidates[:excess]
