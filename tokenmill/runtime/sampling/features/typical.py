"""Locally typical sampling: keep the tokens whose surprise is closest to the distribution's entropy, up to a mass.

Its order is not that of probability, so it edits the row (excluded tokens become impossible) instead of cutting a
sorted list. It looks at the distribution at the request's own temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.runtime.sampling.features.base import Edits, LogitFeature, beside, host_row
from tokenmill.runtime.sampling.numpy_math import log_softmax
from tokenmill.types import Request, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class Typical(LogitFeature):
    def active(self, params: SamplingParams) -> bool:
        return params.typical_p < 1.0 and not params.greedy

    def plan(self, edits: Edits, row: int, request: Request, drafted: Sequence[int]) -> bool:  # noqa: ARG002
        edits.typical[row] = (request.params.typical_p, request.params.temperature)
        return True

    def edit(self, logits: Tensor, request: Request, drafted: Sequence[int]) -> None:  # noqa: ARG002
        logprobs = log_softmax(host_row(logits) / np.float32(request.params.temperature))
        probabilities = np.exp(logprobs)
        with np.errstate(invalid="ignore"):  # 0 * -inf of banned tokens
            entropy = -np.nansum(probabilities * logprobs)
        order = np.argsort(np.abs(-logprobs - entropy), kind="stable")
        mass = probabilities[order].cumsum()
        keep = int((mass < request.params.typical_p).sum()) + 1
        logits[beside(order[keep:], logits)] = float("-inf")
