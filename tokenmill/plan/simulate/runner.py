"""SimRunner: answers the engine core as the runtime does, with placeholder tokens and a time from a cost model.

Counts what a step holds (prompt chunks, decodes), asks the cost model for its milliseconds and keeps them for the
replica that drives the core. All output tokens of a request are one id of its own, so that it ends by length only and
shares no output with others. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenmill.types import Request, StepPlan, StepResult


class CostModel(Protocol):
    def step_ms(self, prefill: Sequence[tuple[int, int]], decode: tuple[int, float]) -> float:
        """Milliseconds of a step: [(new tokens, context before them)], (sequences that decode, their context)."""
        ...


def output_id(request: Request) -> int:
    """The token that this request always gets. The scheduler's arrival counter makes it unique."""
    return -1 - request.arrival


class SimRunner:
    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.plan = StepPlan()  # the last one
        self.ms = 0.0  # of the last step
        self.seconds = 0.0  # of all steps
        self.input_ms = 0.0  # the part of it that prompts caused
        self.decodes_only = False
        self.prompt_tokens = 0  # computed so far, recomputation included
        self.transferred: dict[Request, int] = {}  # tokens whose KV came from elsewhere: no work here

    def execute(self, plan: StepPlan) -> StepResult:
        prefill: list[tuple[int, int]] = []
        count = context = 0
        tokens: list[int | None] = []
        for row in plan.scheduled:
            request, start, new = row.request, row.start, row.count
            if self.transferred:
                start, new = self._left_to_compute(request, start, new)
            if new == 1:
                count += 1
                context += start + 1
            elif new:
                prefill.append((new, start))
                self.prompt_tokens += new
            tokens.append(-1 - request.arrival if row.samples else None)
        self.plan = plan
        self.decodes_only = count == len(plan.scheduled)
        self.ms = self.cost.step_ms(prefill, (count, float(context)))
        self.seconds += self.ms / 1000.0
        self.input_ms = 0.0
        if prefill:
            self.input_ms = self.ms - self.cost.step_ms((), (count, float(context)))
        nothing = [None] * len(tokens)
        return StepResult(tokens, nothing, nothing)  # type: ignore[arg-type]

    def clock(self) -> float:
        """Seconds of simulated steps: what the engine core times steps by."""
        return self.seconds

    def _left_to_compute(self, request: Request, start: int, count: int) -> tuple[int, int]:
        """(start, count) without transferred tokens. After a preemption they must be computed like any others."""
        known = self.transferred.get(request, 0)
        if not known or request.num_preemptions:
            return start, count
        first = max(start, known)
        return first, max(0, start + count - first)
