"""Repetition penalty over prompt and output; frequency and presence penalties over the output only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.runtime.sampling.features.base import Edits, LogitFeature, beside
from tokenmill.types import Request, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class Penalties(LogitFeature):
    def active(self, params: SamplingParams) -> bool:
        return params.penalizes

    def plan(self, edits: Edits, row: int, request: Request, drafted: Sequence[int]) -> bool:
        edits.penalized[row] = (request, drafted)
        return True

    def edit(self, logits: Tensor, request: Request, drafted: Sequence[int]) -> None:
        params = request.params
        if params.repetition_penalty != 1.0:
            seen = beside(np.unique(np.array([*request.token_ids, *drafted], dtype=np.int64)), logits)
            likely = logits[seen] > 0
            raised, lowered = seen[~likely], seen[likely]
            logits[lowered] /= params.repetition_penalty
            logits[raised] *= params.repetition_penalty
        output_ids = [*request.output_ids, *drafted]
        if output_ids and (params.frequency_penalty or params.presence_penalty):
            ids, counts = np.unique(np.array(output_ids, dtype=np.int64), return_counts=True)
            penalties = np.float32(params.frequency_penalty) * counts.astype(np.float32)
            logits[beside(ids, logits)] -= beside(penalties + np.float32(params.presence_penalty), logits)
