"""Structured output: tokens that the request's grammar does not allow are impossible, whatever other features say.

Each request has a matcher of its own, which follows its output; after preemption it goes on where it was. When nothing
but the end-of-text token is allowed, it is sampled, even before min_tokens. Where no token is possible at all (the
grammar ran into a limit, or its masks take so long that they delay other requests), every logit is -inf and the sampler
ends the request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tokenmill.grammar.compiler import MASK_BURST_SECONDS, MASK_SECONDS
from tokenmill.log import get_logger
from tokenmill.runtime.sampling.features.base import LogitFeature
from tokenmill.types import CompiledGrammar, Request, SamplingParams

_log = get_logger(__name__)
_NEVER = float("-inf")


class Grammar(LogitFeature):
    def __init__(self) -> None:
        self._progress: WeakKeyDictionary[Request, _Progress] = WeakKeyDictionary()

    def active(self, params: SamplingParams) -> bool:
        return params.structured is not None

    def allowed(self, request: Request, token_ids: Sequence[int]) -> int:
        return self._followed(request).valid(token_ids)

    def _followed(self, request: Request, drafted: Sequence[int] = ()) -> _Progress:
        assert request.grammar is not None, "a structured request reached the sampler without its grammar"
        output = request.output_ids
        progress = self._progress.get(request)
        if progress is None or not progress.follow(output, drafted):
            progress = self._progress[request] = _Progress(request.grammar)
            progress.follow(output, drafted)
        return progress

    def edit(self, logits: Tensor, request: Request, drafted: Sequence[int]) -> None:
        progress = self._followed(request, drafted)
        banned = progress.banned(logits.numel())
        _ban(logits, banned)
        if banned.all():
            _log.warning("request %s ends: %s", request.request_id, progress.problem())
        elif float(logits.max()) == _NEVER:
            # Other features banned all that is allowed: the grammar wins.
            logits[torch.from_numpy(~banned).to(logits.device)] = 0.0


class _Progress:
    """How far one request is in its grammar."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._matcher = grammar.matcher()
        self._bits = np.zeros((grammar.vocab_size + 31) // 32, dtype=np.int32)
        self._vocab_size = grammar.vocab_size
        self._num_output = 0  # of the request's own tokens, how many the matcher has consumed
        self._drafted: list[int] = []  # consumed after them
        self._seconds_left = MASK_BURST_SECONDS  # of processor time, for masks

    def follow(self, output: list[int], drafted: Sequence[int]) -> bool:
        """Consume the output since the last time, then `drafted`; drafted tokens of last time that do not follow
        now are rolled back. False if that is not possible: start over."""
        following = [*output[self._num_output :], *drafted]
        pairs = zip(self._drafted, following, strict=False)
        shorter = min(len(self._drafted), len(following))
        same = next((n for n, (before, now) in enumerate(pairs) if before != now), shorter)
        extra = len(self._drafted) - same
        if extra and (self._matcher.is_error() or not self._matcher.rollback(extra)):
            return False
        for token_id in following[same:]:
            self._matcher.consume_token(token_id)
        self._num_output, self._drafted = len(output), list(drafted)
        return True

    def valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens the grammar accepts next, one after the other. Does not consume them."""
        if self._matcher.is_error() or self._matcher.is_stopped():
            return 0
        known = next((n for n, token_id in enumerate(token_ids) if token_id >= self._vocab_size), len(token_ids))
        count: int = self._matcher.validate_tokens(list(token_ids[:known]))
        return max(0, count)

    def banned(self, num_logits: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """[num_logits]: True for tokens that the grammar does not allow next."""
        result = np.ones(num_logits, dtype=np.bool_)
        if self._matcher.is_error() or self._seconds_left < 0:
            return result
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        left = self._seconds_left + MASK_SECONDS - (time.thread_time() - began)
        self._seconds_left = min(left, MASK_BURST_SECONDS)
        if self._matcher.is_error():
            return result
        size = min(num_logits, self._vocab_size)
        result[:size] = np.unpackbits(~self._bits.view(np.uint8), bitorder="little")[:size]
        return result

    def problem(self) -> str:
        if self._seconds_left < 0:
            return "its grammar takes too long to follow"
        return f"its grammar allows no token ({' '.join(self._matcher.get_error().split())[:200]})"


def _ban(logits: Tensor, banned: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        logits.numpy()[banned] = _NEVER  # a tenth of the time that masked_fill_ takes for one row
    else:
        logits.masked_fill_(torch.from_numpy(banned).to(logits.device), _NEVER)
