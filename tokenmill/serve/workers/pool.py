"""Runs text jobs in child processes: fair between keys, within limits, on the server's event loop.

Keys take turns, separately for quick and for heavy jobs. Heavy jobs leave one worker to quick ones (where there are
two), and the heavy jobs of one key one more to those of other keys (where there are three), so a key that floods the
pool delays another's job by one of its own at most, and with three workers by none. A caller that is cancelled frees
its place in the queue; where its job already runs, the result is dropped: that is cheaper than a new process, and
bounded. A worker whose job exceeds its time or crashes is replaced. Called by the service.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from tokenmill.grammar.round_robin import RoundRobin
from tokenmill.log import get_logger
from tokenmill.serve.errors import ApiError
from tokenmill.serve.tenants.keys import Client
from tokenmill.serve.workers import jobs
from tokenmill.serve.workers.process import WorkerDiedError, WorkerProcess, WorkerSlowError

_log = get_logger(__name__)
_FIRST_BACKOFF = 0.5
_MAX_BACKOFF = 30.0
_UNSENDABLE = "a text is not valid Unicode, a number is too large or a value too deep: correct it"
_BUSY = "this key has {} texts waiting to be processed: send fewer requests at once"


@dataclass(slots=True, eq=False)
class _Pending:
    job: jobs.Job
    client: Client
    frame: bytes
    heavy: bool
    result: asyncio.Future[jobs.Result] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class WorkerPool:
    def __init__(self, setup: jobs.Setup, num_workers: int, max_queued: int) -> None:
        """`max_queued`: jobs of one key that may wait."""
        self._setup = setup
        self._num_workers = num_workers
        self._max_heavy = max(1, num_workers - 1)
        self._max_heavy_of_key = max(1, self._max_heavy - 1)
        self._max_queued = max_queued
        self._quick: RoundRobin[_Pending] = RoundRobin()
        self._heavy: RoundRobin[_Pending] = RoundRobin()
        self._idle: list[WorkerProcess] = []
        self._busy: dict[WorkerProcess, asyncio.Task[None]] = {}
        self._running_heavy: Counter[str] = Counter()  # heavy jobs of the busy ones, by key
        self._last_was_heavy = False
        self._starting: asyncio.Task[None] | None = None
        self._failures = 0  # starts that failed in a row
        self._closed = False
        self.num_replaced = 0

    def start(self) -> None:
        """Start what is missing, one worker after the other, in the background."""
        if self._starting is None and not self._closed:
            self._starting = asyncio.ensure_future(self._start_missing())

    async def run(self, job: jobs.Job, client: Client) -> jobs.Result:
        """The result of a job. Raises ApiError 429 where the key has too many waiting, 503 where no worker starts."""
        try:
            frame = jobs.framed(job)
        except (ValueError, OverflowError, RecursionError, TypeError):
            return jobs.Rejected(seconds=0.0, message=_UNSENDABLE)
        queue = self._heavy if (heavy := jobs.is_heavy(job, len(frame) - jobs.LENGTH_BYTES)) else self._quick
        if self._quick.count(client.name) + self._heavy.count(client.name) >= self._max_queued:
            raise ApiError(429, _BUSY.format(self._max_queued), code="text_queue_full", retry_after=1)
        pending = _Pending(job, client, frame, heavy)
        queue.add(client.name, pending)
        self._dispatch()
        try:
            return await pending.result
        except asyncio.CancelledError:
            queue.remove(client.name, pending)
            raise

    async def close(self) -> None:
        self._closed = True
        tasks = [*self._busy.values(), *([self._starting] if self._starting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self._idle))
        self._fail_queued(ApiError(503, "the server is shutting down", code="draining"))

    # --- which job runs next ---

    def _dispatch(self) -> None:
        self._idle = [worker for worker in self._idle if worker.alive]
        while self._idle and (pending := self._next()) is not None:
            worker = self._idle.pop()
            self._running_heavy[pending.client.name] += pending.heavy
            self._busy[worker] = asyncio.ensure_future(self._work(worker, pending))
        if len(self._idle) + len(self._busy) < self._num_workers:
            self.start()

    def _next(self) -> _Pending | None:
        """Quick and heavy jobs alternate where both wait and a worker is left for quick ones."""
        pending = None
        if self._running_heavy.total() < self._max_heavy and not (self._quick and self._last_was_heavy):
            full = {key for key, number in self._running_heavy.items() if number >= self._max_heavy_of_key}
            pending = self._heavy.take(full)
        pending = pending or self._quick.take()
        if pending is not None:
            self._last_was_heavy = pending.heavy
        return pending

    # --- running ---

    async def _work(self, worker: WorkerProcess, pending: _Pending) -> None:
        kind = type(pending.job)
        limit = jobs.MAX_SECONDS[kind]
        alive = False
        result: jobs.Result
        try:
            result = await worker.run(pending.frame, limit)
            alive = True
        except WorkerSlowError:
            result = jobs.Rejected(seconds=limit, message=jobs.TOO_SLOW[kind])
        except WorkerDiedError:
            result = jobs.Rejected(seconds=limit, message=jobs.CRASHED[kind])
        except ValueError:
            _log.exception("an unusable answer of a text worker")
            result = jobs.Failed(seconds=limit, message="unusable answer of a text worker")
        except asyncio.CancelledError:
            pending.result.cancel()
            raise
        finally:
            if not alive:
                await worker.kill()
            del self._busy[worker]
            self._running_heavy[pending.client.name] -= pending.heavy
            self._running_heavy += Counter()  # forgets keys without any
        if isinstance(pending.job, jobs.CheckGrammar):  # whether or not its caller still waits
            pending.client.charge_grammar(result.seconds, time.monotonic())
        if not pending.result.done():
            pending.result.set_result(result)
        if alive:
            self._idle.append(worker)
        else:
            self.num_replaced += 1
            _log.warning("text worker %d was replaced: %s", worker.pid, getattr(result, "message", ""))
        self._dispatch()

    # --- starting ---

    async def _start_missing(self) -> None:
        try:
            while not self._closed and len(self._idle) + len(self._busy) < self._num_workers:
                if self._failures:
                    await asyncio.sleep(min(_MAX_BACKOFF, _FIRST_BACKOFF * 2 ** (self._failures - 1)))
                began = time.monotonic()
                try:
                    worker = await WorkerProcess.start(self._setup)
                except (RuntimeError, OSError) as error:
                    self._failures += 1
                    _log.error("a text worker does not start: %s", error)
                    if not self._idle and not self._busy:
                        self._fail_queued(ApiError(503, f"no text worker starts: {error}", code="text_workers_down"))
                        return  # the next job tries again
                    continue
                self._failures = 0
                _log.info("text worker %d is ready after %.2f s", worker.pid, time.monotonic() - began)
                self._idle.append(worker)
                asyncio.get_running_loop().call_soon(self._dispatch)
        finally:
            self._starting = None

    def _fail_queued(self, error: ApiError) -> None:
        for queue in (self._quick, self._heavy):
            while (pending := queue.take()) is not None:
                if not pending.result.done():
                    pending.result.set_exception(error)
