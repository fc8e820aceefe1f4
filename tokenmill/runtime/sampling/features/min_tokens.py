"""`min_tokens`: the tokens that would end the request are impossible until enough were generated."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokenmill.runtime.sampling.features.base import LogitFeature
from tokenmill.types import Request, SamplingParams


class MinTokens(LogitFeature):
    def active(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0

    def edit(self, logits: Tensor, request: Request, drafted: Sequence[int]) -> None:
        if request.num_output_tokens + len(drafted) < request.params.min_tokens and request.stop_ids:
            logits[list(request.stop_ids)] = float("-inf")
