"""A process that has the engine's libraries loaded and waits to be told which model to serve.

Importing them is most of what a start takes. It serves whichever engine needs it first: one that replaces another, or
one that is loaded on demand; the models of a server share one. Knows nothing of models; engine_client.py takes it.
"""

from __future__ import annotations

import asyncio
import contextlib

from tokenmill.log import get_logger
from tokenmill.serve.supervision.link import spawn_engine

_log = get_logger(__name__)


class SpareEngine:
    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    def prepare(self, delay: float) -> None:
        """Have one started after `delay` seconds, unless there is one."""
        if not self._closed and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._start(delay), name="spare-engine")

    def take(self) -> asyncio.subprocess.Process | None:
        """The process, which is the caller's from now on; None if there is none."""
        process, self._process = self._process, None
        return process if process is not None and process.returncode is None else None

    async def close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task
        if self.pid is not None and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _start(self, delay: float) -> None:
        await asyncio.sleep(delay)
        if self.pid is None:
            try:
                self._process = await spawn_engine()
            except Exception as error:  # no harm: a start then takes longer
                _log.warning("cannot start a spare engine process: %s", error)
