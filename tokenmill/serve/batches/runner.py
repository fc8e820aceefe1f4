"""Runs batches beside live traffic: at most so many rows at once, divided among owners, each only while the engine has
a slot that nobody waits for.

Each batch is a task that moves its record from status to status; every move is on disk before it counts, so that after
a kill the next start goes on where the journal ends. A batch whose key is gone waits for it, until it expires. Disk is
touched in threads only. Knows neither HTTP nor the engine: `call` answers a row, `has_room` says when.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenmill.log import get_logger
from tokenmill.serve.batches.answering import POLL_SECONDS, Call, answer_row
from tokenmill.serve.batches.journal import Journal
from tokenmill.serve.batches.lines import LineError, Row, read_rows, unanswered_line
from tokenmill.serve.batches.record import BatchRecord
from tokenmill.serve.batches.store import BatchStore
from tokenmill.serve.errors import ApiError
from tokenmill.serve.files.store import FileStore
from tokenmill.serve.tenants.keys import Client

_log = get_logger(__name__)
_READ_ROWS = 32  # at a time
_RETRY_SECONDS = 10.0  # after the disk failed
_UNANSWERED = {
    "expired": ("batch_expired", "the completion window was over before this request had an answer"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request had an answer"),
}


@dataclass(slots=True)
class _Live:
    """A batch that has a task."""

    record: BatchRecord
    journal: Journal | None = None
    counts: tuple[int, int] = (0, 0)  # completed and failed when the journal was last closed
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # cancelled, or no room for answers
    full: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # of the record: one change after the other


class BatchRunner:
    def __init__(
        self,
        files: FileStore,
        store: BatchStore,
        call: Call,
        client_of: Callable[[str], Client | None],
        has_room: Callable[[Client, str | None], bool],
        *,
        concurrency: int,
        max_line: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`client_of`: who an owner is at present, None if its key is gone; `has_room`: whether a row of the client may
        start that asks for this model."""
        self._files = files
        self._store = store
        self._call = call
        self._client_of = client_of
        self._has_room = has_room
        self._concurrency = concurrency
        self._max_line = max_line
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: Counter[str] = Counter()  # rows by owner
        self._row_ended = asyncio.Event()
        self._creating = asyncio.Lock()  # one after the other, so that the number of batches is bounded

    def start(self) -> None:
        """Go on with what was not finished. Needs a running event loop."""
        for record in self._store.unfinished():
            self._begin(record)

    async def close(self) -> None:
        """Stop asking. Rows in flight are dropped; the next start asks for them again."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- for routes ---

    async def create(
        self, owner: str, endpoint: str, input_file_id: str, window: tuple[str, int], metadata: dict[str, str] | None
    ) -> BatchRecord:
        """`window`: as it was written, and in seconds."""
        async with self._creating:
            self._files.find(owner, input_file_id)
            self._store.check_room(owner)
            await asyncio.to_thread(self._files.check_number, owner)
            now = int(self._clock())
            record = BatchRecord(
                f"batch_{uuid.uuid4().hex}", owner, endpoint, input_file_id, window[0], now, now + window[1],
                metadata=metadata,
            )  # fmt: skip
            await asyncio.to_thread(self._store.save, record)
            self._begin(record)
            return record

    async def cancel(self, owner: str, batch_id: str) -> BatchRecord:
        self._store.find(owner, batch_id)
        live = self._live.get(batch_id)
        if live is not None and await self._enter(live, "cancelling"):
            live.stop.set()
        record = self.find(owner, batch_id)
        if record.status not in ("cancelling", "cancelled"):
            raise ApiError(409, f"the batch is {record.status}: it cannot be cancelled", code="batch_ended")
        return record

    def find(self, owner: str, batch_id: str) -> BatchRecord:
        record = self._store.find(owner, batch_id)
        live = self._live.get(batch_id)
        return record if live is None else _counted(live)

    def listed(self, owner: str) -> list[BatchRecord]:
        return [self.find(owner, record.id) for record in self._store.listed(owner)]

    # --- a batch's task ---

    def _begin(self, record: BatchRecord) -> None:
        live = self._live[record.id] = _Live(record)
        self._files.held.add(record.input_file_id)
        task = asyncio.create_task(self._drive(live))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drive(self, live: _Live) -> None:
        moves = {"validating": self._validate, "in_progress": self._run}
        while not live.record.ended:
            try:
                await moves.get(live.record.status, self._end)(live)
            except OSError as error:
                _log.error("%s waits: %s", live.record.id, error)
                await asyncio.sleep(_RETRY_SECONDS)
            except Exception:
                _log.exception("%s failed", live.record.id)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _enter(self, live: _Live, status: str, **changes: Any) -> bool:
        """On disk, then here. False if the batch took another way meanwhile: it was cancelled."""
        async with live.lock:
            if not live.record.may_enter(status):
                return False
            entered = live.record.enter(status, self._clock(), **changes)
            await asyncio.to_thread(self._store.save, entered)
            live.record = entered
            if entered.ended:
                self._release(entered)
            return True

    def _release(self, record: BatchRecord) -> None:
        """It has ended: whoever sees that may delete its file."""
        del self._live[record.id]
        if not any(each.record.input_file_id == record.input_file_id for each in self._live.values()):
            self._files.held.discard(record.input_file_id)

    async def _validate(self, live: _Live) -> None:
        def count() -> int:
            number = 0
            for number, _row in enumerate(self._rows(live.record), 1):
                if number % 256 == 0:
                    time.sleep(0.001)  # the event loop's thread goes first
            return number

        try:
            total = await asyncio.to_thread(count)
        except FileNotFoundError:
            await self._enter(live, "failed", errors=[_problem("file_not_found", "the input file was deleted")])
        except LineError as error:
            shown = _problem(error.code, error.message, error.param, error.line)
            await self._enter(live, "failed", errors=[shown])
        else:
            await self._enter(live, "in_progress", total=total)

    async def _run(self, live: _Live) -> None:
        record = live.record
        journal = await self._open_journal(live)
        work = asyncio.ensure_future(self._answer_all(live, journal))
        stop = asyncio.ensure_future(live.stop.wait())
        try:
            left = max(0.0, record.expires_at - self._clock())
            await asyncio.wait((work, stop), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            finished = work.done()
            work.cancel()
            stop.cancel()
            try:
                await asyncio.gather(work, stop, return_exceptions=True)
            finally:
                self._close_journal(live)
        counts: dict[str, Any] = {"completed": journal.num_succeeded, "failed": journal.num_failed}
        if live.full and not finished:
            counts["errors"] = [_problem("files_full", "the files of this key have no room for more answers")]
        ending = "completed" if finished else "failed" if live.full else "expired"
        await self._enter(live, "finalizing", ending=ending, **counts)

    async def _answer_all(self, live: _Live, journal: Journal) -> None:
        rows = self._rows(live.record)
        async with asyncio.TaskGroup() as group:
            while batch := await asyncio.to_thread(lambda: list(itertools.islice(rows, _READ_ROWS))):
                for row in batch:
                    if row.custom_id not in journal.ids:
                        await self._may_start(live.record.owner, row)
                        self._running[live.record.owner] += 1
                        answering = group.create_task(self._answer(live, journal, row))
                        answering.add_done_callback(lambda _: self._leave(live.record.owner))

    async def _answer(self, live: _Live, journal: Journal, row: Row) -> None:
        owner = live.record.owner
        line = await answer_row(self._call, row, lambda: self._client(owner, row))
        await asyncio.to_thread(self._keep, owner, journal, row, line)
        client = self._client_of(owner)
        if client is not None and self._files.used(owner) > self._files.limit(client.num_keys):
            live.full = True
            live.stop.set()

    def _leave(self, owner: str) -> None:
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        self._row_ended.set()

    def _keep(self, owner: str, journal: Journal, row: Row, line: bytes) -> None:
        if journal.append(row.custom_id, line):
            self._files.charge(owner, len(line))

    async def _may_start(self, owner: str, row: Row) -> None:
        """Wait until the owner may have this row in flight: within its part of the concurrency."""
        while True:
            owners = {each.record.owner for each in self._live.values() if each.journal is not None}
            if self._running[owner] < max(1, self._concurrency // max(1, len(owners))):
                await self._client(owner, row)
                return
            await self._pause(POLL_SECONDS)

    async def _client(self, owner: str, row: Row) -> Client:
        """Wait until the engine has room for the row; the client that the owner is then."""
        while True:
            client = self._client_of(owner)
            if client is not None and self._has_room(client, row.model):
                return client
            await self._pause(POLL_SECONDS)

    async def _pause(self, seconds: float) -> None:
        """Until a row ends, at most for this time."""
        self._row_ended.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._row_ended.wait()

    # --- the end ---

    async def _end(self, live: _Live) -> None:
        """Write the result files. Repeated as a whole after a kill, with the same ids."""
        status = live.record.ending or "cancelled"
        journal = await self._open_journal(live)
        try:
            output, error = await asyncio.to_thread(self._write_results, live.record, journal, status)
            counts = {"completed": journal.num_succeeded, "failed": journal.num_failed}
        finally:
            self._close_journal(live)
        await self._enter(live, status, output_file_id=output, error_file_id=error, **counts)
        with contextlib.suppress(OSError):  # then the next start does it
            await asyncio.to_thread(self._store.drop_journal, live.record)

    def _write_results(self, record: BatchRecord, journal: Journal, status: str) -> tuple[str | None, str | None]:
        journal.sync()
        num_unanswered = record.total - len(journal.ids) if status in _UNANSWERED else 0
        output: str | None = None
        error: str | None = None
        if journal.num_succeeded:
            output = record.result_id("output")
            answers = (line for entry, line in journal.lines() if entry.succeeded)
            self._files.put(record.owner, output, f"{record.id}_output.jsonl", "batch_output", answers)
        if journal.num_failed or num_unanswered > 0:
            error = record.result_id("error")
            failed = (line for entry, line in journal.lines() if not entry.succeeded)
            left = self._unanswered(record, journal, status) if num_unanswered > 0 else iter(())
            lines = itertools.chain(failed, left)
            self._files.put(record.owner, error, f"{record.id}_error.jsonl", "batch_output", lines)
        return output, error

    def _unanswered(self, record: BatchRecord, journal: Journal, status: str) -> Iterator[bytes]:
        with contextlib.suppress(OSError, LineError):  # an input that was lost names no more requests
            for row in self._rows(record):
                if row.custom_id not in journal.ids:
                    yield unanswered_line(row, *_UNANSWERED[status])

    def _rows(self, record: BatchRecord) -> Iterator[Row]:
        return read_rows(self._files.path(record.owner, record.input_file_id), (record.endpoint,), self._max_line)

    async def _open_journal(self, live: _Live) -> Journal:
        """What it holds counts among the bytes of its owner while it is open."""
        opening = asyncio.ensure_future(asyncio.to_thread(self._store.open_journal, live.record))
        try:
            live.journal = journal = await asyncio.shield(opening)
        except asyncio.CancelledError:
            (await opening).close()  # the thread went on
            raise
        self._files.charge(live.record.owner, journal.num_bytes)
        return journal

    def _close_journal(self, live: _Live) -> None:
        journal = live.journal
        if journal is not None:
            journal.close()
            live.counts = journal.num_succeeded, journal.num_failed
            self._files.charge(live.record.owner, -journal.num_bytes)
            live.journal = None


def _problem(code: str, message: str, param: str | None = None, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}


def _counted(live: _Live) -> BatchRecord:
    """The record with what the journal has so far."""
    journal = live.journal
    if live.record.status not in ("in_progress", "cancelling"):
        return live.record
    completed, failed = (journal.num_succeeded, journal.num_failed) if journal is not None else live.counts
    return msgspec.structs.replace(live.record, completed=completed, failed=failed)
