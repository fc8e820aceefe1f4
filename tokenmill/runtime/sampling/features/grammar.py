"""Structured output: tokens that the request's grammar does not allow are impossible, whatever other features say.

Each request has a matcher of its own, which follows its output; after preemption it goes on where it was. When nothing
but the end-of-text token is allowed, it is sampled, even before min_tokens. Where no token is possible at all (the
grammar ran into a limit, or its masks take so long that they delay other requests), every logit is -inf and the sampler
ends the request.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tokenmill.grammar.progress import GrammarProgress
from tokenmill.log import get_logger
from tokenmill.runtime.sampling.features.base import Edits, LogitFeature, beside
from tokenmill.types import Request, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

_log = get_logger(__name__)
_NEVER = float("-inf")
_THREADS = max(1, min(16, (os.cpu_count() or 1) - 2))  # that compute masks; the engine's own is one of them
_ROWS_PER_THREAD = 2  # at least: a mask takes 30 microseconds to 2 milliseconds


class Grammar(LogitFeature):
    def __init__(self) -> None:
        self._progress: WeakKeyDictionary[Request, GrammarProgress] = WeakKeyDictionary()
        self._threads: ThreadPoolExecutor | None = None  # started with the first step of many rows

    def active(self, params: SamplingParams) -> bool:
        return params.structured is not None

    def allowed(self, request: Request, token_ids: Sequence[int]) -> int:
        return self.progress(request).valid(token_ids)

    def progress(self, request: Request, drafted: Sequence[int] = ()) -> GrammarProgress:
        """How far its output is in the grammar, with `drafted` tokens after it."""
        assert request.grammar is not None, "a structured request reached the sampler without its grammar"
        output = request.output_ids
        progress = self._progress.get(request)
        if progress is None or not progress.follow(output, drafted):
            progress = self._progress[request] = GrammarProgress(request.grammar)
            progress.follow(output, drafted)
        return progress

    def prepare(self, requests: Sequence[Request], drafted: Sequence[Sequence[int]]) -> None:
        """Compute the masks of all rows, in several threads: the library lets others run meanwhile."""
        rows = [pair for pair in zip(requests, drafted, strict=True) if self.active(pair[0].params)]
        share = min(_THREADS, len(rows) // _ROWS_PER_THREAD)
        if share < 2 or len({id(request) for request, _ in rows}) < len(rows):
            return  # `plan` does it
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS - 1, "tokenmill-masks")

        def work() -> None:
            while True:
                try:
                    request, tokens = rows.pop()
                except IndexError:  # another thread took the last one
                    return
                self.progress(request, tokens).mask()

        others = [self._threads.submit(work) for _ in range(share - 1)]
        work()
        for other in others:
            other.result()

    def plan(self, edits: Edits, row: int, request: Request, drafted: Sequence[int]) -> bool:
        progress = self.progress(request, drafted)
        bits = progress.mask()
        if bits is None or not bits.any():
            _log.warning("request %s ends: %s", request.request_id, progress.problem())
            bits = np.zeros(1, dtype=np.int32)
        else:
            edits.preferred[row] = bits
        edits.allow(row, bits)
        return True

    def edit(self, logits: Tensor, request: Request, drafted: Sequence[int]) -> None:
        progress = self.progress(request, drafted)
        banned = progress.banned(len(logits))
        _ban(logits, banned)
        if banned.all():
            _log.warning("request %s ends: %s", request.request_id, progress.problem())
        elif float(logits.max()) == _NEVER:
            # Other features banned all that is allowed: the grammar wins.
            logits[beside(~banned, logits)] = 0.0


def _ban(logits: Any, banned: NDArray[np.bool_]) -> None:
    if not isinstance(logits, np.ndarray) and logits.device.type == "cpu":
        logits = logits.numpy()  # a tenth of the time that masked_fill_ takes for one row
    if isinstance(logits, np.ndarray):
        logits[banned] = _NEVER
    else:
        logits.masked_fill_(beside(banned, logits), _NEVER)
