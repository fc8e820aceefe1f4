"""`logit_bias`: a number added to the logits of chosen tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmill.runtime.sampling.features.base import LogitFeature
from tokenmill.types import Request, SamplingParams


class LogitBias(LogitFeature):
    def active(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def edit(self, logits: Tensor, request: Request, drafted: Sequence[int]) -> None:  # noqa: ARG002
        bias = request.params.logit_bias or {}
        ids = torch.tensor(list(bias), device=logits.device)
        logits[ids] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
