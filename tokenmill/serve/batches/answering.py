"""One row of a batch asked until it has a final answer.

What passes by itself (a full queue, a used-up quota, an engine that restarts) is waited for; what the request itself
causes is an answer like any other. Knows neither files nor how a call reaches the engine. The runner and `run-batch`
use it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tokenmill.serve.batches.lines import Row, result_line
from tokenmill.serve.tenants.keys import Client

_MAX_WAIT = 60.0
_MIN_WAIT = 0.05
_MAX_FAILURES = 3  # of the engine under one row: it may be the cause
POLL_SECONDS = 0.05  # between two looks for a free slot


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes  # JSON
    code: str | None = None  # of an error
    retry_after: float | None = None

    @property
    def passes(self) -> bool:
        """Whether the same request may succeed later. A 401 is that of a key that was withdrawn meanwhile."""
        return self.status in (401, 503) or (self.status == 429 and self.code != "deadline")


# client, path, body, request id
Call = Callable[[Client, str, bytes, str], Awaitable[Answer]]


async def answer_row(call: Call, row: Row, client: Callable[[], Awaitable[Client]]) -> bytes:
    """The line that answers `row`. `client` waits for a moment at which it may run, and says for whom."""
    num_failures = 0
    while True:
        request_id = uuid.uuid4().hex
        answer = await call(await client(), row.url, row.body, request_id)
        num_failures += answer.status == 503
        if not answer.passes or num_failures >= _MAX_FAILURES:
            return result_line(row, answer.status, request_id, answer.body)
        await asyncio.sleep(min(max(answer.retry_after or 0.0, _MIN_WAIT), _MAX_WAIT))
