"""`bad_words`: a token that would complete one of them is impossible. Words in the prompt do not count."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokenmill.runtime.sampling.features.base import LogitFeature
from tokenmill.types import Request, SamplingParams


class BadWords(LogitFeature):
    def active(self, params: SamplingParams) -> bool:
        return bool(params.bad_word_ids)

    def edit(self, logits: Tensor, request: Request, drafted: Sequence[int]) -> None:
        words = request.params.bad_word_ids
        begin = max(len(request.prompt_ids), request.num_tokens - max(map(len, words)))
        tail = (*request.token_ids[begin:], *drafted)
        banned = [ids[-1] for ids in words if tail[len(tail) - len(ids) + 1 :] == ids[:-1]]
        if banned:
            logits[banned] = float("-inf")
