"""When each prompt waited and when it was computed, chunk by chunk: what a request is told about its own time.

Kept from the arrival of a request in the scheduler to its first token; the record then leaves with that event and with
the last one. A step in which no prompt is computed costs nothing here. Knows neither text nor keys; EngineCore calls it
in an engine that serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tokenmill.timeline import PromptChunk, Timeline
from tokenmill.types import Request, StepPlan

_MAX_CHUNKS = 64  # listed one by one; those beyond are added to the last


class Timelines:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, Timeline] = {}  # by request id: those without a first token

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: Request) -> None:
        request.timeline = self._open[request.request_id] = Timeline(queued=self._clock())

    def record(self, plan: StepPlan, seconds: float) -> None:
        """A step of `seconds` has just ended."""
        if not self._open:
            return
        ended, num_rows = self._clock(), len(plan.scheduled)
        for row in plan.scheduled:
            line = self._open.get(row.request.request_id)
            if line is None:
                continue
            _add(line, PromptChunk(ended - seconds, ended, row.start, row.count, num_rows))
            if row.samples:
                del self._open[row.request.request_id]

    def forget(self, request_id: str) -> None:
        """Of a request that was cancelled."""
        self._open.pop(request_id, None)


def _add(line: Timeline, chunk: PromptChunk) -> None:
    line.num_chunks += 1
    if len(line.chunks) < _MAX_CHUNKS:
        line.chunks.append(chunk)
        return
    last = line.chunks[-1]
    last.ended, last.num_rows = chunk.ended, chunk.num_rows
    last.count = chunk.start + chunk.count - last.start
