"""Structured output: tokens that the request's grammar does not allow are impossible, whatever other features say.

Each request has a matcher of its own, which follows its output; after preemption it goes on where it was. When nothing
but the end-of-text token is allowed, it is sampled, even before min_tokens. Where no token is possible at all (the
grammar ran into a limit, or its masks take so long that they delay other requests), every logit is -inf and the sampler
ends the request.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tokenmill.grammar.progress import GrammarProgress
from tokenmill.log import get_logger
from tokenmill.runtime.sampling.features.base import Edits, LogitFeature, beside
from tokenmill.types import CompiledGrammar, Request, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

_log = get_logger(__name__)
_NEVER = float("-inf")
_THREADS = max(1, min(16, (os.cpu_count() or 1) - 2))  # that compute masks; the engine's own is one of them
_MIN_SHARED_SECONDS = 5e-4  # that the masks of a step take: less is not worth the threads
# Rows that go to another lane of their grammar in one step, and how long their output may be: it is followed again.
_MAX_MOVED_ROWS = 4
_MAX_MOVED_TOKENS = 256


class Grammar(LogitFeature):
    def __init__(self) -> None:
        self._progress: WeakKeyDictionary[Request, GrammarProgress] = WeakKeyDictionary()
        self._threads: ThreadPoolExecutor | None = None  # started with the first step of many rows
        self._num_followed = 0  # outputs so far

    def active(self, params: SamplingParams) -> bool:
        return params.structured is not None

    def allowed(self, request: Request, token_ids: Sequence[int]) -> int:
        return self.progress(request).valid(token_ids)

    def progress(self, request: Request, drafted: Sequence[int] = ()) -> GrammarProgress:
        """How far its output is in the grammar, with `drafted` tokens after it."""
        assert request.grammar is not None, "a structured request reached the sampler without its grammar"
        progress = self._progress.get(request)
        if progress is not None and progress.is_at(len(request.token_ids) - len(request.prompt_ids), drafted):
            return progress
        output = request.output_ids
        if progress is None or not progress.follow(output, drafted):
            self._num_followed += 1
            lane = self._num_followed % request.grammar.num_lanes
            progress = self._progress[request] = GrammarProgress(request.grammar, lane)
            progress.follow(output, drafted)
        return progress

    def prepare(self, requests: Sequence[Request], drafted: Sequence[Sequence[int]]) -> None:
        """Compute the masks of all rows that lack one, a lane of a grammar in each thread: the library lets others run
        meanwhile."""
        rows = [pair for pair in zip(requests, drafted, strict=True) if self.active(pair[0].params)]
        seconds = sum(request.grammar.mask_seconds for request, _ in rows if request.grammar is not None)
        if _THREADS < 2 or seconds < _MIN_SHARED_SECONDS or len({id(request) for request, _ in rows}) < len(rows):
            return  # `plan` does it
        lanes: dict[CompiledGrammar, dict[int, list[Request]]] = {}
        computed: set[Hashable] = {None}
        for request, tokens in rows:
            progress = self.progress(request, tokens)
            lacking = progress.lacks()
            if lacking in computed:
                continue
            computed.add(lacking)
            lanes.setdefault(progress.grammar, {}).setdefault(progress.lane, []).append(request)
        if not any(tokens for _, tokens in rows):  # which `_balance` would forget
            for grammar, by_lane in lanes.items():
                self._balance(grammar, by_lane)
        jobs = [group for by_lane in lanes.values() for group in by_lane.values() if group]
        if len(jobs) > 1:
            self._compute(sorted(jobs, key=len))

    def _balance(self, grammar: CompiledGrammar, by_lane: dict[int, list[Request]]) -> None:
        """As many rows of the grammar in each of its lanes, after some steps."""
        num_rows = sum(map(len, by_lane.values()))
        if grammar.num_lanes < min(_THREADS, num_rows // 2):
            grammar.want_lane()
        for _ in range(_MAX_MOVED_ROWS):
            source = max(by_lane, key=lambda lane: len(by_lane[lane]))
            target = min(range(grammar.num_lanes), key=lambda lane: len(by_lane.get(lane, ())))
            request = by_lane[source][-1]
            if len(by_lane[source]) < len(by_lane.get(target, ())) + 2 or len(request.output_ids) > _MAX_MOVED_TOKENS:
                return
            self._progress[request] = self._progress[request].moved(target, request.output_ids)
            by_lane.setdefault(target, []).append(by_lane[source].pop())

    def _compute(self, jobs: list[list[Request]]) -> None:
        """The masks of some rows for each job, the last one first."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS - 1, "tokenmill-masks")

        def work() -> None:
            while True:
                try:
                    requests = jobs.pop()
                except IndexError:  # another thread took the last one
                    return
                for request in requests:
                    self._progress[request].mask()

        others = [self._threads.submit(work) for _ in range(min(_THREADS, len(jobs)) - 1)]
        work()
        for other in others:
            other.result()

    def plan(self, edits: Edits, row: int, request: Request, drafted: Sequence[int]) -> bool:
        progress = self.progress(request, drafted)
        bits = progress.mask()
        if bits is None:
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
