"""How a step's prompt tokens are divided among tenants: a long prompt of one does not hold up the others' first token.

Each tenant that wants prompt tokens has an allowance by the discipline's shares; what is left over then goes by order.
Made by the scheduler for each step in which several tenants compete; without a tenant here there is no limit.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.engine.order.base import Discipline
from tokenmill.types import Request


class PromptShares:
    def __init__(self, discipline: Discipline, requests: Sequence[Request], budget: int) -> None:
        """`requests`: all that want prompt tokens of this step, in order; `budget`: how many there are."""
        self._left: dict[str, int] = {}
        for request in requests:
            if request.tenant in self._left:
                continue
            share = discipline.prompt_share(request, requests)
            if share < 1:
                self._left[request.tenant] = int(share * budget)

    def __bool__(self) -> bool:
        return bool(self._left)

    def limit(self, request: Request, budget: int) -> int:
        """How many of the `budget` tokens left in this step the request may take."""
        return max(0, min(budget, self._left.get(request.tenant, budget)))

    def take(self, request: Request, num_tokens: int) -> None:
        if request.tenant in self._left:
            self._left[request.tenant] -= num_tokens
