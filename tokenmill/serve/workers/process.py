"""One text worker seen from the server: its start, one job at a time, its end.

A job that exceeds its processor time ends with its worker killed; so does one that makes no progress at all. Knows
nothing of queues and keys; pool.py owns it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time

from tokenmill.serve.workers import jobs

_START_SECONDS = 120.0  # from a cold disk, on a busy machine
_MIN_WAIT = 0.01
_STALL_FACTOR = 10.0  # by the clock, for a job whose worker gets little or no processor time
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


class WorkerDiedError(Exception):
    """The worker ended in the middle of a job."""


class WorkerSlowError(Exception):
    """The job exceeded its time; the worker is killed."""


class WorkerProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout

    @classmethod
    async def start(cls, setup: jobs.Setup) -> WorkerProcess:
        """A worker that has loaded what it needs. Raises RuntimeError with the reason otherwise."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tokenmill.serve.workers.child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,  # a terminal's Ctrl-C is for the server alone
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(_START_SECONDS):
                ready = jobs.decode_ready(await worker._exchange(jobs.framed(setup)))
        except TimeoutError:
            await worker.kill()
            raise RuntimeError(f"it did not start within {_START_SECONDS:.0f} s") from None
        except (WorkerDiedError, ValueError):
            await worker.kill()
            raise RuntimeError("it ended while it loaded the tokenizer; does its memory limit suffice?") from None
        except BaseException:
            await worker.kill()
            raise
        if ready.error:
            await worker.kill()
            raise RuntimeError(ready.error)
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def run(self, frame: bytes, seconds: float) -> jobs.Result:
        """The result of a framed job that may take `seconds` of processor time."""
        exchange = asyncio.ensure_future(self._exchange(frame))
        began, used_before = time.monotonic(), self._processor_seconds()
        left = seconds
        try:
            while not (await asyncio.wait((exchange,), timeout=max(left, _MIN_WAIT)))[0]:
                used = self._processor_seconds()
                left = seconds - (used - used_before) if used is not None and used_before is not None else 0.0
                if left <= 0 or time.monotonic() - began > _STALL_FACTOR * seconds:
                    raise WorkerSlowError
            return jobs.decode_result(exchange.result())
        finally:
            exchange.cancel()

    async def kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()

    async def _exchange(self, frame: bytes) -> bytes:
        try:
            self._stdin.write(frame)
            await self._stdin.drain()
            head = await self._stdout.readexactly(jobs.LENGTH_BYTES)
            return await self._stdout.readexactly(jobs.frame_length(head))
        except (ConnectionError, asyncio.IncompleteReadError):
            raise WorkerDiedError from None

    def _processor_seconds(self) -> float | None:
        """Of the whole process so far; None where the system does not tell, and the time of a job is what passes."""
        try:
            return time.clock_gettime((~self.pid << 3) | 2) if sys.platform == "linux" else None
        except OSError:
            return None
