"""`tokenmill run-batch`: a file of requests answered without a port, by the routes that HTTP requests take.

The output file is its own journal: what it already answers is not asked again, so a run that was killed goes on where
it was with the same command. Input and output are checked before the model is loaded. Called by the CLI.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.checkpoint.sources import resolve
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.serve.batches.answering import POLL_SECONDS, answer_row
from tokenmill.serve.batches.journal import Journal, JournalError
from tokenmill.serve.batches.lines import ENDPOINTS, LineError, Row, read_rows
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.server import make_text_workers, read_overrides, start_engine
from tokenmill.serve.supervision.making import make_engine
from tokenmill.serve.supervision.signals import StopSignals, end_within, in_daemon_thread
from tokenmill.serve.supervision.startup import StartupReport
from tokenmill.serve.tenants.keys import Client, KeyRing

if TYPE_CHECKING:
    from tokenmill.serve.api.background import BackgroundCalls
    from tokenmill.serve.service import Service
    from tokenmill.serve.supervision.engine import Engine
    from tokenmill.serve.workers.pool import WorkerPool

MAX_LINE = 64 << 20  # bytes
_MAX_ROWS = 1 << 30
_READ_ROWS = 32  # at a time
_WAITING = 4  # rows beyond the slots of the engine, so that none of them idles
_CLOSE_SECONDS = 2.0
_EXIT_SECONDS = 3.0

Progress = Callable[["Counts"], None]


@dataclass(slots=True)
class Counts:
    total: int
    resumed: int  # answered by an earlier run
    completed: int = 0
    failed: int = 0


def run_batch(
    model: str, source: Path, target: Path, config: ServeConfig, engine_config: EngineConfig, progress: Progress
) -> Counts:
    """Answer what `target` does not answer yet. Raises KeyboardInterrupt if told to stop before the end."""
    total, journal = open_batch(source, target)
    counts = Counts(total, len(journal.ids), journal.num_succeeded, journal.num_failed)
    try:
        work = _Run(source, journal, counts, progress)
        if counts.resumed < total and not asyncio.run(work.run(model, config, engine_config)):
            raise KeyboardInterrupt
        journal.sync()
    except ExceptionGroup as group:  # of the tasks that answer rows
        first = group.exceptions[0]
        if isinstance(first, OSError):
            problem = f"cannot write {target}: {first.strerror}"
            raise UserError(problem, "make room, then run the same command again") from None
        raise first from None
    finally:
        journal.close()
    return counts


def open_batch(source: Path, target: Path) -> tuple[int, Journal]:
    """Check both files as wholes. Nothing is written to one that is not ours."""
    if target.exists() and source.exists() and target.samefile(source):
        raise UserError(f"{target} is the input too", "give another -o")
    if target.exists() and not target.is_file():
        raise UserError(f"cannot use {target}: it is not a plain file", "give another -o")
    try:
        ids = {row.custom_id: row.id for row in rows_of(source)}
        journal = Journal(target)
    except LineError as error:
        where = f"line {error.line} of {source}" if error.line else str(source)
        raise UserError(f"{where}: {error.message}", "correct it; nothing has been answered in this run") from None
    except JournalError as error:
        raise UserError(f"{target} is not the output of a batch: {error}", "give another -o, or delete it") from None
    except BlockingIOError:
        raise UserError(f"another run writes to {target}", "wait for it, or give another -o") from None
    except OSError as error:
        raise UserError(f"cannot use {error.filename}: {error.strerror}", "check -i and -o") from None
    for custom_id, answer_id in journal.ids.items():
        if ids.get(custom_id) != answer_id:
            journal.close()
            problem = f"{target} answers another request as '{custom_id[:80]}' than {source} has"
            raise UserError(problem, "give another -o, or delete it")
    return len(ids), journal


def rows_of(source: Path) -> Iterator[Row]:
    return read_rows(source, ENDPOINTS, MAX_LINE, _MAX_ROWS)


class BatchEngine:
    """An engine as a server starts it, with the routes of one, that answers rows. Lives in one event loop."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._workers: WorkerPool | None = None
        self._service: Service | None = None
        self._call: BackgroundCalls | None = None
        self._client = KeyRing().find(None)

    async def start(self, model: str, config: ServeConfig, engine_config: EngineConfig, report: StartupReport) -> bool:
        """Raises what keeps it from starting."""
        report.phase("finding the model")
        path = await in_daemon_thread(lambda: resolve(model).path)
        template_source, defaults = read_overrides(path, config)
        report.phase("starting the engine")
        engine = self._engine = make_engine(path, config, engine_config, report)
        workers = self._workers = make_text_workers(path, engine_config.load_format, config, template_source)
        started = await start_engine(path, engine_config.load_format, engine, template_source)
        service_class, identity, tokenizer, template = started
        names = (*config.served_model_name, model)
        self._service = service_class(
            config, names, engine, identity, tokenizer, template, workers, sampling_defaults=defaults
        )
        from tokenmill.serve.api.background import BackgroundCalls
        from tokenmill.serve.app import routes_of

        self._call = BackgroundCalls(routes_of(self._service, KeyRing()))
        report.stop()
        return True

    @property
    def num_places(self) -> int:
        """Rows to ask at a time."""
        assert self._service is not None
        return self._service.admission.num_slots + _WAITING

    async def answer(self, row: Row) -> bytes:
        """The line that answers it. Waits while the engine is being replaced."""
        assert self._call is not None
        return await answer_row(self._call, row, self._ready)

    async def _ready(self) -> Client:
        assert self._engine is not None
        assert self._client is not None
        while self._engine.state != "ready":
            await asyncio.sleep(POLL_SECONDS)
        return self._client

    async def close(self) -> None:
        if self._workers is not None:
            await self._workers.close()
        if self._engine is not None:
            await self._engine.close(_CLOSE_SECONDS)


class _Run:
    def __init__(self, source: Path, journal: Journal, counts: Counts, progress: Progress) -> None:
        self._source = source
        self._journal = journal
        self._counts = counts
        self._progress = progress

    async def run(self, model: str, config: ServeConfig, engine_config: EngineConfig) -> bool:
        """Start an engine as a server does, answer, and end it. False if a signal came before all was answered."""
        report, signals = StartupReport(), StopSignals(0.0)
        engine = BatchEngine()
        try:
            if await signals.unless_told(engine.start(model, config, engine_config, report)) is None:
                return False
            return await signals.unless_told(self._answer_all(engine)) is not None
        finally:
            report.stop()
            await engine.close()
            if signals.told.is_set():
                end_within(_EXIT_SECONDS)

    async def _answer_all(self, engine: BatchEngine) -> bool:
        places = asyncio.Semaphore(engine.num_places)

        async def answer(row: Row) -> None:
            try:
                self._keep(row, await engine.answer(row))
            finally:
                places.release()

        rows = rows_of(self._source)
        async with asyncio.TaskGroup() as group:
            while batch := await asyncio.to_thread(lambda: list(itertools.islice(rows, _READ_ROWS))):
                for row in batch:
                    if row.custom_id not in self._journal.ids:
                        await places.acquire()
                        group.create_task(answer(row))
        return True

    def _keep(self, row: Row, line: bytes) -> None:
        self._journal.append(row.custom_id, line)
        self._counts.completed, self._counts.failed = self._journal.num_succeeded, self._journal.num_failed
        self._progress(self._counts)
