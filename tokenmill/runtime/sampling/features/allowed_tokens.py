"""`allowed_token_ids`: every other token is impossible, the end of the text included unless it is listed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from tokenmill.grammar.vocabulary import Bits
from tokenmill.runtime.sampling.features.base import Edits, LogitFeature, token_bits
from tokenmill.types import Request, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class AllowedTokens(LogitFeature):
    def __init__(self) -> None:
        self._bits: WeakKeyDictionary[Request, Bits] = WeakKeyDictionary()  # made once for each request

    def active(self, params: SamplingParams) -> bool:
        return params.allowed_token_ids is not None

    def plan(self, edits: Edits, row: int, request: Request, drafted: Sequence[int]) -> bool:  # noqa: ARG002
        bits = self._bits.get(request)
        if bits is None:
            bits = self._bits[request] = token_bits(request.params.allowed_token_ids or (), edits.vocab)
        edits.allow(row, bits)
        return True

    def edit(self, logits: Tensor, request: Request, drafted: Sequence[int]) -> None:  # noqa: ARG002
        ids = list(request.params.allowed_token_ids or ())
        kept = logits[ids]
        logits[:] = float("-inf")
        logits[ids] = kept
