"""`bad_words`: a token that would complete one of them is impossible. Words in the prompt do not count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenmill.runtime.sampling.features.base import Edits, LogitFeature
from tokenmill.types import Request, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class BadWords(LogitFeature):
    def active(self, params: SamplingParams) -> bool:
        return bool(params.bad_word_ids)

    def plan(self, edits: Edits, row: int, request: Request, drafted: Sequence[int]) -> bool:
        edits.ban(row, _completing(request, drafted))
        return True

    def edit(self, logits: Tensor, request: Request, drafted: Sequence[int]) -> None:
        banned = _completing(request, drafted)
        if banned:
            logits[banned] = float("-inf")


def _completing(request: Request, drafted: Sequence[int]) -> list[int]:
    words = request.params.bad_word_ids
    begin = max(len(request.prompt_ids), request.num_tokens - max(map(len, words)))
    tail = (*request.token_ids[begin:], *drafted)
    return [ids[-1] for ids in words if tail[len(tail) - len(ids) + 1 :] == ids[:-1]]
