"""Repetition penalty over prompt and output; frequency and presence penalties over the output only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmill.runtime.sampling.features.base import LogitFeature
from tokenmill.types import Request, SamplingParams


class Penalties(LogitFeature):
    def active(self, params: SamplingParams) -> bool:
        return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0

    def edit(self, logits: Tensor, request: Request, drafted: Sequence[int]) -> None:
        params = request.params
        if params.repetition_penalty != 1.0:
            seen = torch.tensor([*request.token_ids, *drafted], device=logits.device).unique()
            values = logits[seen]
            logits[seen] = torch.where(
                values > 0, values / params.repetition_penalty, values * params.repetition_penalty
            )
        output_ids = [*request.output_ids, *drafted]
        if output_ids and (params.frequency_penalty or params.presence_penalty):
            output = torch.tensor(output_ids, device=logits.device)
            ids, counts = output.unique(return_counts=True)
            logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
