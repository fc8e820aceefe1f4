"""`tokenmill run-batch --ray`: the rows of a batch answered by workers on a Ray cluster, by Ray Data.

Each worker is an actor with an engine of its own; Ray Data hands it blocks of rows, and starts another worker and hands
the block out again where one dies. Answers are written here, by the one process that holds the output file: a row that
was answered twice is written once, and the same command goes on after this process was killed. Rows are sorted by what
they ask, so that those with a common beginning meet in the same prefix cache.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.data
from ray.exceptions import RayError

from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.log import configure
from tokenmill.ray.app import connect
from tokenmill.serve.batches.journal import Journal
from tokenmill.serve.batches.lines import Row
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.offline import BatchEngine, Counts, Progress, open_batch, rows_of
from tokenmill.serve.supervision.startup import StartupReport

_MIN_BLOCK, _MAX_BLOCK = 8, 64  # rows: what is computed again where a worker dies
_BLOCKS_PER_WORKER = 8  # of a small batch, so that workers end together
_BLOCKS_AT_A_TIME = 2  # of a worker: the second fills the places that the first one's longest rows leave


@dataclass(frozen=True, slots=True)
class Workers:
    count: int = 1
    cpus: float = 1.0  # of each
    gpus: float = 0.0
    address: str = ""  # of the cluster

    def __post_init__(self) -> None:
        if self.count < 1 or self.cpus < 0 or self.gpus < 0:
            raise UserError(f"{self.count} workers with {self.cpus:g} CPUs and {self.gpus:g} GPUs", "give one or more")


class Worker:
    """What Ray Data makes an actor of. Its engine lives in an event loop of its own thread; blocks come in others."""

    def __init__(self, model: str, config: ServeConfig, engine_config: EngineConfig) -> None:
        configure("warning")
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._engine = BatchEngine()
        self._wait(self._engine.start(model, config, engine_config, StartupReport()))

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        columns = zip(block["number"], block["custom_id"], block["url"], block["body"], strict=True)
        rows = [Row(int(number), str(name), str(url), bytes(body)) for number, name, url, body in columns]
        lines = self._wait(self._answer(rows))
        return {"custom_id": [row.custom_id for row in rows], "line": lines}

    async def _answer(self, rows: list[Row]) -> list[bytes]:
        places = asyncio.Semaphore(self._engine.num_places)

        async def answer(row: Row) -> bytes:
            async with places:
                return await self._engine.answer(row)

        return await asyncio.gather(*(answer(row) for row in rows))

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def run_batch(
    model: str,
    source: Path,
    target: Path,
    config: ServeConfig,
    engine_config: EngineConfig,
    progress: Progress,
    workers: Workers,
) -> Counts:
    """Answer what `target` does not answer yet."""
    total, journal = open_batch(source, target)
    counts = Counts(total, len(journal.ids), journal.num_succeeded, journal.num_failed)
    try:
        left = [row for row in rows_of(source) if row.custom_id not in journal.ids]
        if left:
            is_new = connect(workers.address)
            try:
                _answer_all(left, journal, counts, progress, _pipeline(left, workers, (model, config, engine_config)))
            finally:
                if is_new:
                    ray.shutdown()
        journal.sync()
    except RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise UserError(f"the workers cannot go on: {reason}", "correct it, then run the same command again") from None
    except OSError as error:
        problem = f"cannot write {target}: {error.strerror}"
        raise UserError(problem, "make room, then run the same command again") from None
    finally:
        journal.close()
    return counts


def _pipeline(rows: list[Row], workers: Workers, engine: tuple[str, ServeConfig, EngineConfig]) -> ray.data.Dataset:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = False
    rows.sort(key=lambda row: (row.url, row.body))
    items = [{"number": row.number, "custom_id": row.custom_id, "url": row.url, "body": row.body} for row in rows]
    block = max(_MIN_BLOCK, min(_MAX_BLOCK, len(items) // (_BLOCKS_PER_WORKER * workers.count)))
    blocks = -(-len(items) // block)
    return ray.data.from_items(items, override_num_blocks=blocks).map_batches(
        Worker,
        batch_size=block,
        batch_format="numpy",
        fn_constructor_args=engine,
        compute=ray.data.ActorPoolStrategy(
            size=workers.count,
            max_tasks_in_flight_per_actor=2 * _BLOCKS_AT_A_TIME,
            max_concurrent_calls_per_actor=_BLOCKS_AT_A_TIME,
            enable_true_multi_threading=True,
        ),
        num_cpus=workers.cpus,
        num_gpus=workers.gpus,
    )


def _answer_all(
    rows: list[Row], journal: Journal, counts: Counts, progress: Progress, answers: ray.data.Dataset
) -> None:
    wanted = {row.custom_id for row in rows}
    for answer in answers.iter_rows():
        name = str(answer["custom_id"])
        if name not in wanted:  # a block that was handed out twice
            continue
        wanted.discard(name)
        journal.append(name, bytes(answer["line"]))
        counts.completed, counts.failed = journal.num_succeeded, journal.num_failed
        progress(counts)
    if wanted:
        problem = f"{len(wanted)} requests came back without an answer, such as '{min(wanted)[:80]}'"
        raise UserError(problem, "run the same command again: what is answered is kept")
