"""`logit_bias`: a number added to the logits of chosen tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.runtime.sampling.features.base import Edits, LogitFeature, beside
from tokenmill.types import Request, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class LogitBias(LogitFeature):
    def active(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def plan(self, edits: Edits, row: int, request: Request, drafted: Sequence[int]) -> bool:  # noqa: ARG002
        edits.added[row] = request.params.logit_bias or {}
        return True

    def edit(self, logits: Tensor, request: Request, drafted: Sequence[int]) -> None:  # noqa: ARG002
        bias = request.params.logit_bias or {}
        logits[list(bias)] += beside(np.array(list(bias.values()), dtype=np.float32), logits)
