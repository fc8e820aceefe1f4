"""Times of engine steps and the facts of the engine, written beside a server's traffic log.

`StepLog` wraps the runner: each line of `steps.jsonl` is one step, what it held and how long it took until the next one
began, so that sending events, taking messages in and other processes on the same cores are included. `server.json`
says which engine it was. No text, no tokens. Written by the engine process, read by plan/simulate (the digital twin).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tokenmill.engine.core import EngineCore, Runner
from tokenmill.hardware.machine import detect_machine
from tokenmill.log import get_logger
from tokenmill.types import Request, StepPlan, StepResult

if TYPE_CHECKING:
    from tokenmill.engine.build import EngineParts

STEPS_FILE = "steps.jsonl"
SERVER_FILE = "server.json"
VERSION = 1
_ALL_STEPS = 20_000  # are logged, then
_PER_SECOND = 10  # at most: a day takes some 50 MB
_MAX_STEPS = 2_000_000  # of one engine
_FLUSH_SECONDS = 0.5
_log = get_logger(__name__)


class StepLog:
    """A runner that logs what it passes on. A step that cannot be written ends the log, not the engine."""

    def __init__(
        self, runner: Runner, file: IO[str], all_steps: int = _ALL_STEPS, clock: Callable[[], float] = time.time
    ) -> None:
        """The first `all_steps` are logged, of the others a few each second."""
        self.runner = runner
        self._file: IO[str] | None = file
        self._all_steps = all_steps
        self._clock = clock
        self._begun: tuple[float, float, list[int], set[Request]] | None = None  # begin, end, counts, requests
        self._second = 0
        self._in_second = 0
        self._num_steps = 0
        self._flushed = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        begin = self._clock()
        self._close(plan, begin)
        result = self.runner.execute(plan)
        if self._file is not None and not result.num_drafted and plan.run == 1 and self._wanted(begin):
            self._begun = begin, self._clock(), _counts(plan), {row.request for row in plan.scheduled}
        return result

    def _wanted(self, now: float) -> bool:
        if int(now) != self._second:
            self._second, self._in_second = int(now), 0
        self._in_second += 1
        return self._num_steps < self._all_steps or (self._in_second <= _PER_SECOND and self._num_steps < _MAX_STEPS)

    def _close(self, plan: StepPlan, now: float) -> None:
        """Write the step before this one. If none of its requests goes on, the engine may have been idle since: then
        only the runner's own time is known."""
        if self._begun is None or self._file is None:
            return
        begin, end, counts, requests = self._begun
        self._begun = None
        until = now if any(row.request in requests for row in plan.scheduled) else end
        self._num_steps += 1
        try:
            self._file.write(json.dumps([round(begin, 4), round(1e3 * (until - begin), 3), *counts]) + "\n")
            if now - self._flushed > _FLUSH_SECONDS:
                self._flushed = now
                self._file.flush()
        except OSError as error:
            _log.warning("steps are no longer logged: %s", error)
            self._file = None


def _counts(plan: StepPlan) -> list[int]:
    """[decodes, their context, then new tokens and the context before them of each prompt chunk]."""
    decodes = [row.start + 1 for row in plan.scheduled if row.count == 1]
    chunks = [(row.count, row.start) for row in plan.scheduled if row.count > 1]
    return [len(decodes), sum(decodes), *(number for chunk in chunks for number in chunk)]


def log_steps_to(folder: Path, parts: EngineParts) -> None:
    """Log the steps of this engine from now on, and write down what it is. What cannot be written is not logged."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = engine_facts(parts)
        with _open(folder / SERVER_FILE, os.O_TRUNC) as written:
            written.write(json.dumps(facts, indent=1))
        file = _open(folder / STEPS_FILE, os.O_APPEND)
        file.write(json.dumps({"version": VERSION, "started": facts["started"]}) + "\n")
    except OSError as error:
        _log.warning("steps are not logged in %s: %s", folder, error)
        return
    _wrap(parts.core, file)


def _open(path: Path, flag: int) -> IO[str]:
    """Like the rest of a traffic log, for this user alone."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flag, 0o600), "w", encoding="utf-8")


def _wrap(core: EngineCore, file: IO[str]) -> None:
    core.runner = StepLog(core.runner, file)


def engine_facts(parts: EngineParts) -> dict[str, Any]:
    """What a simulation of this engine needs: its resolved configuration and how its KV memory is divided."""
    from tokenmill import __version__

    runtime, config, machine = parts.runtime, parts.config, detect_machine()
    options = {name: value for name, value in asdict(config).items() if name not in ("sources", "kv_redis")}
    return {
        "version": VERSION,
        "tokenmill": __version__,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": str(parts.path),
        "name": parts.description.name,
        "device": machine.gpus[0].split(",")[0] if config.device == "cuda" and machine.gpus else machine.cpu,
        "config": options,
        "groups": [[group.kind, group.window, list(group.layers)] for group in runtime.layout.groups],
        "num_pages": runtime.budget.num_pages,
        "weight_bytes": runtime.model.weight_bytes,
    }
