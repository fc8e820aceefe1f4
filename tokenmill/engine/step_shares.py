"""How a step's tokens are divided among tenants: what one of them sends lengthens the steps of the others only so far.

Where the discipline sets an allowance, a tenant has that many tokens of the step, decodes and prompts together, and its
sequences take turns. Prompts are besides divided by the discipline's shares, and what is left of those goes by order.
With one tenant there is no limit but that of the pace, where decodes have an objective. Owned by the scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tokenmill.engine.order.base import Discipline
from tokenmill.engine.order.queue import RequestQueue
from tokenmill.engine.pace import StepPace
from tokenmill.types import Request, StepPlan


class StepShares:
    def __init__(self, discipline: Discipline, pace: StepPace | None = None) -> None:
        self._discipline = discipline
        self._pace = pace
        self._allowed: dict[str, int] = {}  # tokens of this step by tenant; no entry: no limit
        self._prompts: dict[str, int] = {}  # of those of its prompts
        self._turns: dict[Request, int] = {}  # sequences that gave way: since which step
        self._num_steps = 0

    def begin(self, decodes: list[Request], prompts: Iterable[Request], waiting: RequestQueue) -> list[Request]:
        """A new step. The decodes, with those first that gave way before; the order stays if there are none."""
        self._num_steps += 1
        self._allowed, self._prompts = {}, {}
        if self._pace is not None:
            self._pace.begin(len(decodes))
        if self._discipline.shares_steps:
            demands: Counter[str] = Counter(request.tenant for request in decodes)
            for request in (*prompts, *waiting.snapshot()):
                demands[request.tenant] += request.num_tokens - request.num_computed
            self._allowed = self._discipline.step_allowances(demands)
        if not self._turns:
            return decodes
        return sorted(decodes, key=lambda request: self._turns.get(request, self._num_steps))

    def divide_prompts(self, requests: Sequence[Request], budget: int) -> None:
        """`requests`: all that want prompt tokens of this step, in order; `budget`: how many there are."""
        for request in requests:
            if request.tenant in self._prompts:
                continue
            share = self._discipline.prompt_share(request, requests)
            if share < 1:
                self._prompts[request.tenant] = int(share * budget)

    @property
    def leaves_rest(self) -> bool:
        """Whether prompts have shares of which others may take what is left."""
        return bool(self._prompts) and not self._allowed

    @property
    def has_room(self) -> bool:
        """Whether another prompt may begin in this step."""
        return self._pace is None or not self._pace.exhausted

    def allows(self, request: Request) -> bool:
        """Whether the request may have a token of this step."""
        return self._allowed.get(request.tenant, 1) > 0

    def barred(self, waiting: RequestQueue) -> list[Request]:
        """Those whose tenants have had their share of this step."""
        return [request for request in waiting.snapshot() if not self.allows(request)]

    def gives_way(self, request: Request) -> bool:
        """Whether a running sequence leaves this step to others. It has its turn in one of the next, before those
        that had theirs."""
        if self.allows(request):
            return False
        self._turns.setdefault(request, self._num_steps)
        return True

    def limit(self, request: Request, budget: int, start: int) -> int:
        """How many of the `budget` tokens left in this step the request may take for its prompt from `start` on."""
        share = self._prompts.get(request.tenant, budget)
        limit = max(0, min(budget, share, self._allowed.get(request.tenant, budget)))
        return self.paced(limit, start)

    def paced(self, wanted: int, start: int) -> int:
        """How many of the `wanted` prompt tokens from `start` on the pace of the decodes allows."""
        return wanted if self._pace is None else self._pace.limit(wanted, start)

    def paced_drafts(self, wanted: int) -> int:
        return wanted if self._pace is None else self._pace.spare(wanted)

    def take(self, request: Request, num_tokens: int) -> None:
        self._turns.pop(request, None)
        if self._pace is not None:
            self._pace.take(request.num_computed, num_tokens)
        for table in (self._allowed, self._prompts):
            if request.tenant in table:
                table[request.tenant] -= num_tokens

    def forget(self, request: Request) -> None:
        """It does not run any more."""
        self._turns.pop(request, None)

    def record_step(self, plan: StepPlan, num_drafted: int | None, seconds: float) -> None:
        """`num_drafted`: tokens that were computed besides those of the plan; None: these were several steps."""
        if self._pace is not None and num_drafted is not None:
            self._pace.record(plan, num_drafted, seconds)
        if not self._discipline.max_slowdown:
            return
        counts: Counter[str] = Counter()
        for row in plan.scheduled:
            counts[row.request.tenant] += row.count
        self._discipline.record_step(counts, seconds)
