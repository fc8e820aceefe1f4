"""Applies budget policies to requests: whether one can be taken, how far a row may go, which pages leave.

Between the KV manager, which owns the pages, and the policies, which only choose. Knows no tensors: scores come from
the runtime through `PageScores`.
"""

from __future__ import annotations

from tokenmill.engine.kv.budget import BUDGETS
from tokenmill.engine.kv.budget.base import ATTENTION, BudgetPolicy, NoScores, PageScores
from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.types import Request, SamplingParams

_REMEDY = "leave kv_policy out, or use streaming_llm"


class BudgetEnforcer:
    def __init__(self, layout: KVLayout, scores: PageScores | None = None) -> None:
        self.page_size = layout.page_size
        self.scores: PageScores = scores or NoScores()
        # Pages that a window can see must stay: their distance to the query counts there.
        window = max((group.window for group in layout.groups if group.kind == "sliding"), default=0)
        self._num_recent = -(-window // layout.page_size) + (window > 0)
        self._keeps_all = any(group.kind != "sliding" for group in layout.groups)
        self._has_states = bool(layout.states)
        self._policies: dict[str, BudgetPolicy] = {}

    def check(self, params: SamplingParams) -> None:
        """Raise UserError if this engine cannot keep the budget that a request asks for."""
        cache = params.cache
        if cache is None or not cache.budget:
            return
        policy = self._policy(cache.policy)
        if self._has_states:
            raise UserError("a kv_budget is not supported for models with recurrent layers", "leave it out")
        if not self._keeps_all:
            raise UserError("this model's layers forget by themselves: a kv_budget has no effect", "leave it out")
        if policy.score and policy.score not in self.scores.kinds:
            raise UserError(f"kv_policy {cache.policy} needs scores that this engine does not keep", _REMEDY)
        if policy.score == ATTENTION and params.n > 1:
            raise UserError(f"kv_policy {cache.policy} takes one answer a request, n is {params.n}", _REMEDY)
        least = policy.min_pages * self.page_size
        if cache.budget < least:
            raise UserError(f"kv_budget is {cache.budget}", f"give at least {least} with this model")

    def needs_all_computed(self, request: Request) -> bool:
        """Whether cached pages are of no use to it, because how they are attended to must be seen.
        Asked before its first step, so that this is watched from then on."""
        cache = request.budget
        if cache is None or self._policy(cache.policy).score != ATTENTION:
            return False
        self.scores.keep(ATTENTION)
        return True

    def row_limit(self, request: Request, start: int) -> int:
        """The most tokens that a row which begins at `start` may have: pages leave between rows, at moments that the
        request alone decides."""
        end = len(request.prompt_ids)
        return end - start if start < end else self.page_size - start % self.page_size

    def victims(self, request: Request, tables: tuple[list[int], ...], num_dropped: int) -> list[int]:
        """Entries of the tables to give up before the next token is computed, ascending."""
        cache = request.budget
        if cache is None or request.num_computed < len(request.prompt_ids):
            return []
        num_full = (request.num_computed - num_dropped) // self.page_size
        budget = -(-cache.budget // self.page_size)
        excess = num_full + 1 - budget  # with the page that is written next
        if excess <= 0:
            return []
        policy = self._policy(cache.policy)
        scores = self.scores.scores(policy.score, request, tables, num_full) if policy.score else ()
        return policy.victims(num_full, excess, budget, scores)

    def _policy(self, name: str) -> BudgetPolicy:
        if name not in self._policies:
            self._policies[name] = BUDGETS.get(name)(self.page_size, self._num_recent)
        return self._policies[name]
