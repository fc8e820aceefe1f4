"""`min_tokens`: the tokens that would end the request are impossible until enough were generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenmill.runtime.sampling.features.base import Edits, LogitFeature
from tokenmill.types import Request, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class MinTokens(LogitFeature):
    def active(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0

    def plan(self, edits: Edits, row: int, request: Request, drafted: Sequence[int]) -> bool:
        if _is_early(request, drafted):
            edits.ban(row, list(request.stop_ids))
        return True

    def edit(self, logits: Tensor, request: Request, drafted: Sequence[int]) -> None:
        if _is_early(request, drafted):
            logits[list(request.stop_ids)] = float("-inf")


def _is_early(request: Request, drafted: Sequence[int]) -> bool:
    return request.num_output_tokens + len(drafted) < request.params.min_tokens and bool(request.stop_ids)
