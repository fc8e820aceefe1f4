"""`allowed_token_ids`: every other token is impossible, the end of the text included unless it is listed."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tokenmill.runtime.sampling.features.base import LogitFeature
from tokenmill.types import Request, SamplingParams


class AllowedTokens(LogitFeature):
    def __init__(self) -> None:
        self._banned: WeakKeyDictionary[Request, Tensor] = WeakKeyDictionary()  # [vocab], made once for each request

    def active(self, params: SamplingParams) -> bool:
        return params.allowed_token_ids is not None

    def edit(self, logits: Tensor, request: Request, drafted: Sequence[int]) -> None:  # noqa: ARG002
        banned = self._banned.get(request)
        if banned is None or banned.device != logits.device:
            banned = torch.ones_like(logits, dtype=torch.bool)
            banned[list(request.params.allowed_token_ids or ())] = False
            self._banned[request] = banned
        logits.masked_fill_(banned, float("-inf"))
