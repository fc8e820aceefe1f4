"""Executes a StepPlan without sampling: passes the float32 logits that each request wants to a visitor.

Replaces ModelRunner under the same scheduler, so that batching, chunking and the prefix cache apply to scoring as to
serving. What the logits are used for is up to the caller.
Called by engine/scoring.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenmill.runtime.executors.base import StepInput
from tokenmill.runtime.runner import ModelRunner
from tokenmill.types import Request, ScheduledTokens, StepPlan, StepResult

# (request, position of the first row's token, logits [R, vocabulary]: valid only during the call)
LogitVisitor = Callable[[Request, int, Tensor], None]


class LogitRunner:
    def __init__(self, runner: ModelRunner, visit: LogitVisitor, on_device: bool = False) -> None:
        """`on_device`: logits stay where the model computed them, instead of being copied to the CPU."""
        self._runner = runner
        self._visit = visit
        self._on_device = on_device

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        runner, rows = self._runner, plan.scheduled
        runner.copy(plan)
        wanted = [_wanted(row) for row in rows]
        output = runner.executor.step(StepInput(rows, logit_ranges=wanted))
        begin, limit = 0, runner.executor.max_logit_rows
        for row, offsets in zip(rows, wanted, strict=True):
            for first in range(0, len(offsets), limit):
                part = offsets[first : first + limit]
                logits = torch.as_tensor(output.logits(begin, begin + len(part)))
                device = logits.device if self._on_device else torch.device("cpu")
                self._visit(row.request, row.start + part[0], logits.to(device, torch.float32))
                begin += len(part)
        # The scheduler ends a request at its first token, whichever it is: it is never read.
        tokens: list[int | None] = [0 if row.samples else None for row in rows]
        return StepResult(tokens, [None] * len(rows), [None] * len(rows))


def _wanted(row: ScheduledTokens) -> range:
    """Which of the row's tokens have their logits read, counted from the first of them."""
    first = row.request.logits_from
    assert first is not None, "a request without logits_from among those to be scored"
    return range(min(row.count, max(0, first - row.start)), row.count)
