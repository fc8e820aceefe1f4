"""A budget of reasoning tokens: once it is spent, the token that ends the reasoning is the only possible one.

The model then goes on with its answer. Outputs that do not reason, or have ended their reasoning, are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenmill.runtime.sampling.features.base import Edits, LogitFeature, token_bits
from tokenmill.types import Request, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class ReasoningBudget(LogitFeature):
    def active(self, params: SamplingParams) -> bool:
        return params.reasoning is not None

    def plan(self, edits: Edits, row: int, request: Request, drafted: Sequence[int]) -> bool:
        end_id = _due(request, drafted)
        if end_id is not None:
            only = token_bits([end_id], edits.vocab)
            edits.allowed[row] = edits.preferred[row] = only
            edits.banned.pop(row, None)
        return True

    def edit(self, logits: Tensor, request: Request, drafted: Sequence[int]) -> None:
        end_id = _due(request, drafted)
        if end_id is not None:
            logits[:] = float("-inf")
            logits[end_id] = 0.0


def _due(request: Request, drafted: Sequence[int]) -> int | None:
    """The token that ends the reasoning, where it must come now."""
    budget = request.params.reasoning
    assert budget is not None
    if request.num_output_tokens + len(drafted) < budget.max_tokens:
        return None
    output = [*request.output_ids, *drafted]
    if budget.end_id in output or (budget.start_id is not None and budget.start_id not in output[:2]):
        return None
    return budget.end_id
