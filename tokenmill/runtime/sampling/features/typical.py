"""Locally typical sampling: keep the tokens whose surprise is closest to the distribution's entropy, up to a mass.

Its order is not that of probability, so it edits the row (excluded tokens become impossible) instead of cutting a
sorted list. It looks at the distribution at the request's own temperature.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmill.runtime.sampling.features.base import LogitFeature
from tokenmill.types import Request, SamplingParams


class Typical(LogitFeature):
    def active(self, params: SamplingParams) -> bool:
        return params.typical_p < 1.0 and not params.greedy

    def edit(self, logits: Tensor, request: Request, drafted: Sequence[int]) -> None:  # noqa: ARG002
        logprobs = (logits / request.params.temperature).log_softmax(-1)
        probabilities = logprobs.exp()
        entropy = -torch.nansum(probabilities * logprobs)
        order = (-logprobs - entropy).abs().argsort()
        mass = probabilities[order].cumsum(-1)
        keep = int((mass < request.params.typical_p).sum()) + 1
        logits[order[keep:]] = float("-inf")
