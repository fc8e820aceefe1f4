"""A budget of reasoning tokens: once it is spent, the token that ends the reasoning is the only possible one.

The model then goes on with its answer. Outputs that do not reason, or have ended their reasoning, are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokenmill.runtime.sampling.features.base import LogitFeature
from tokenmill.types import Request, SamplingParams


class ReasoningBudget(LogitFeature):
    def active(self, params: SamplingParams) -> bool:
        return params.reasoning is not None

    def edit(self, logits: Tensor, request: Request, drafted: Sequence[int]) -> None:
        budget = request.params.reasoning
        assert budget is not None
        if request.num_output_tokens + len(drafted) < budget.max_tokens:
            return
        output = [*request.output_ids, *drafted]
        if budget.end_id in output or (budget.start_id is not None and budget.start_id not in output[:2]):
            return
        logits.fill_(float("-inf"))
        logits[budget.end_id] = 0.0
