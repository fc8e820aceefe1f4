"""Faults for soak.py --chaos: an engine killed or frozen, Redis restarted, a full disk, a network that stalls.

Each fault is a task that strikes at random until it is cancelled. `EngineFaults` also measures: the time until the
server is ready with a new engine, and whether that engine gives the greedy answer of the first one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from benchmarks.soak_clients import PROBE

_READY_LIMIT = 60.0  # seconds after which an engine counts as not coming back
_POLL = 0.05


class Restartable(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Recovery:
    fault: str  # "killed" or "frozen"
    at_seconds: float  # since the run began
    back_seconds: float  # from the kill, or from the moment at which a frozen engine counts as stuck
    same_answer: bool


@dataclass(slots=True)
class FaultLog:
    began: float = field(default_factory=time.monotonic)
    recoveries: list[Recovery] = field(default_factory=list)
    redis_restarts: int = 0
    disk_fills: int = 0
    network_stalls: int = 0


async def engine_pid(http: httpx.AsyncClient) -> int:
    return int((await http.get("/load")).json().get("engine_pid") or 0)


async def is_ready(http: httpx.AsyncClient) -> bool:
    """`/readyz`, or `/health` of servers that have only that."""
    with contextlib.suppress(httpx.HTTPError):
        answer = await http.get("/readyz", timeout=5)
        if answer.status_code == 404:
            answer = await http.get("/health", timeout=5)
        return answer.status_code == 200
    return False


async def greedy_answer(http: httpx.AsyncClient, seconds: float = 60.0) -> str | None:
    """The probe's text; refusals are retried."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        answer = await http.post("/v1/completions", json=PROBE)
        if answer.status_code == 200:
            text: str = answer.json()["choices"][0]["text"]
            return text
        await asyncio.sleep(0.1)
    return None


class EngineFaults:
    """Kills or freezes the engine at random moments and waits for the next one."""

    def __init__(self, http: httpx.AsyncClient, log: FaultLog, expected: str, stall_timeout: float) -> None:
        self._http = http
        self._log = log
        self._expected = expected
        self._stall_timeout = stall_timeout

    async def run(self, choose: random.Random, pause: tuple[float, float], until: float) -> None:
        while True:
            wait = choose.uniform(*pause)
            if time.monotonic() + wait > until:
                return
            await asyncio.sleep(wait)
            await self._strike(choose.choice(("killed", "frozen")))

    async def _strike(self, fault: str) -> None:
        old = await engine_pid(self._http)
        if not old:
            return
        began = time.monotonic()
        try:
            os.kill(old, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        except ProcessLookupError:
            return
        ready = await self._wait_for_another(old)
        grace = self._stall_timeout if fault == "frozen" else 0.0
        same = await greedy_answer(self._http) == self._expected
        back = max(0.0, ready - began - grace)
        self._log.recoveries.append(Recovery(fault, round(began - self._log.began, 1), round(back, 2), same))

    async def _wait_for_another(self, old: int) -> float:
        """The moment at which the server was ready with an engine other than `old`."""
        end = time.monotonic() + _READY_LIMIT
        while time.monotonic() < end:
            with contextlib.suppress(httpx.HTTPError):
                if await engine_pid(self._http) not in (0, old) and await is_ready(self._http):
                    return time.monotonic()
            await asyncio.sleep(_POLL)
        return float("inf")


async def restart_redis(
    server: Restartable, log: FaultLog, choose: random.Random, pause: tuple[float, float], until: float
) -> None:
    while (wait := choose.uniform(*pause)) + time.monotonic() < until:
        await asyncio.sleep(wait)
        server.stop()
        try:
            await asyncio.sleep(choose.uniform(1.0, 6.0))
        finally:
            await asyncio.to_thread(server.start)
        log.redis_restarts += 1


async def fill_disk(
    http: httpx.AsyncClient, log: FaultLog, choose: random.Random, pause: tuple[float, float], until: float
) -> None:
    """No engine can write to a file for some seconds, as on a full disk. By RLIMIT_FSIZE, because a folder without
    write permission does not stop root and a small file system needs privileges; an engine that starts meanwhile gets
    the limit as well."""
    while (wait := choose.uniform(*pause)) + time.monotonic() < until:
        await asyncio.sleep(wait)
        end = time.monotonic() + choose.uniform(3.0, 10.0)
        try:
            while time.monotonic() < end:
                with contextlib.suppress(httpx.HTTPError):
                    _limit_files(await engine_pid(http), 0)
                await asyncio.sleep(0.5)
        finally:
            with contextlib.suppress(httpx.HTTPError):
                _limit_files(await engine_pid(http), None)
        log.disk_fills += 1


def _limit_files(pid: int, size: int | None) -> None:
    if not pid:
        return
    with contextlib.suppress(OSError):
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


class StallingProxy:
    """A TCP proxy whose connections all stop for a while, in both directions, as a network does."""

    def __init__(self, url: str, log: FaultLog) -> None:
        parsed = httpx.URL(url)
        self._target = (parsed.host, parsed.port or 80)
        self._log = log
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: Any) -> None:
        self._flowing.set()
        assert self._server is not None
        self._server.close()

    async def run(self, choose: random.Random, pause: tuple[float, float], until: float) -> None:
        while (wait := choose.uniform(*pause)) + time.monotonic() < until:
            await asyncio.sleep(wait)
            self._flowing.clear()
            try:
                await asyncio.sleep(choose.uniform(1.0, 8.0))
            finally:
                self._flowing.set()
            self._log.network_stalls += 1

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pump(reader, upstream_writer), self._pump(upstream_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while data := await reader.read(65536):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()


async def stalled_clients(
    url: str, key: str, choose: random.Random, until: float, counted: Callable[[str], None]
) -> None:
    """One client after the other that stops in the middle: of its head, of its body, or of reading its answer."""
    target = httpx.URL(url)
    stream = b'{"prompt": "Once", "max_tokens": 100, "n": 8, "stream": true, "ignore_eos": true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {target.host}:{target.port}\r\nAuthorization: Bearer {key}\r\n"
    whole = f"{head}Content-Type: application/json\r\nContent-Length: {len(stream)}\r\n\r\n".encode() + stream
    shapes = {"in its head": whole[:60], "in its body": whole[:-20], "reading": whole}
    while time.monotonic() < until:
        name, data = choose.choice(list(shapes.items()))
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(target.host, target.port, limit=1024)
            writer.write(data)
            await asyncio.sleep(choose.uniform(1.0, 10.0))
            writer.transport.abort()
            counted(f"a client that stopped {name}")
