"""Child processes that try inputs in batches: a crash, a hang or too much memory costs one input, not the run.

The child announces each input before it tries it; the parent watches the announcements and replaces a child that ends
or stops making progress. Used by fuzz.py.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from tokenmill.errors import UserError
from tokenmill.log import configure

MEMORY_BYTES = 2 << 30  # above what the child uses once the door is ready
SECONDS_PER_INPUT = 20.0
_START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Batch:
    door: str
    make_door: Callable[[Path, str], Any]  # a class of a module that the child can import
    start: int
    count: int
    seed: int
    server: str = ""


@dataclass(slots=True)
class Report:
    """Of one door. `findings`: input number -> what went wrong."""

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0


def make_input(door: Any, batch_seed: int, name: str, number: int) -> Any:
    return door.make(Random(f"{batch_seed}:{name}:{number}"))


class Tester:
    """One child and the batch it works on."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._batch: Batch | None = None
        self._process: Any = None
        self.pipe: Connection | None = None

    @property
    def idle(self) -> bool:
        return self._batch is None

    def begin(self, batch: Batch) -> None:
        if self._process is None:
            self.pipe, other = self._context.Pipe()
            self._process = self._context.Process(target=_work, args=(other,), daemon=True)
            self._process.start()
            other.close()
        assert self.pipe is not None
        self._batch = batch
        self._current, self._since, self._limit = batch.start, time.monotonic(), _START_SECONDS
        self.pipe.send(batch)

    def poll(self, reports: dict[str, Report]) -> Batch | None:
        """Take what the child said. Gives back the rest of a batch whose child had to be replaced."""
        batch = self._batch
        if batch is None or self.pipe is None:
            return None
        report = reports[batch.door]
        try:
            while self.pipe.poll(0):
                kind, value = self.pipe.recv()
                if kind == "trying":
                    self._current, self._since, self._limit = value, time.monotonic(), SECONDS_PER_INPUT
                elif kind == "finding":
                    report.outcomes["finding"] += 1
                    report.findings[self._current] = value
                elif kind == "done":
                    outcomes, seconds = value
                    report.outcomes.update(outcomes)
                    report.seconds += seconds
                    self._batch = None
                    return None
        except (EOFError, OSError):
            self._process.join(5)
            return self._replace(report, f"the process ended with code {self._process.exitcode}")
        if time.monotonic() - self._since > self._limit:
            return self._replace(report, f"no outcome within {self._limit:.0f} s")
        return None

    def _replace(self, report: Report, why: str) -> Batch | None:
        batch = self._batch
        assert batch is not None
        report.outcomes["finding"] += 1
        report.findings[self._current] = why
        # The child counts outcomes and tells them at the end of a batch: these are lost, and were no findings.
        told = sum(1 for number in report.findings if batch.start <= number <= self._current)
        report.outcomes["not classified"] += self._current + 1 - batch.start - told
        self.close()
        left = batch.start + batch.count - self._current - 1
        return replace(batch, start=self._current + 1, count=left) if left > 0 else None

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._batch = None


def _work(pipe: Connection) -> None:
    configure("error")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries that panic write pages of it
    doors: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tokenmill-fuzz-") as folder, contextlib.suppress(EOFError):
        while True:
            batch: Batch = pipe.recv()
            if batch.door not in doors:
                own = Path(folder) / batch.door
                own.mkdir()
                _limit_memory(None)
                doors[batch.door] = batch.make_door(own, batch.server)
                _limit_memory(MEMORY_BYTES)
            _try_batch(doors[batch.door], batch, pipe)


def _try_batch(door: Any, batch: Batch, pipe: Connection) -> None:
    outcomes: Counter[str] = Counter()
    began = time.monotonic()
    for number in range(batch.start, batch.start + batch.count):
        data = make_input(door, batch.seed, batch.door, number)
        pipe.send(("trying", number))
        try:
            door.attempt(data)
            outcomes["accepted"] += 1
        except UserError:
            outcomes["refused"] += 1
        except BaseException as error:  # whatever it is, it is a finding
            pipe.send(("finding", _described(error)))
    pipe.send(("done", (outcomes, time.monotonic() - began)))


def _described(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = next((frame for frame in reversed(frames) if "tokenmill" in frame.filename), frames[-1])
    text = " ".join(str(error).split())[:160]
    return f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"


def _limit_memory(above: int | None) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if above is None or sys.platform != "linux":
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + above, most))
