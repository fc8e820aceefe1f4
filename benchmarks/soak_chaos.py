"""`soak.py --chaos`: 64 clients of 8 tenants while faults strike, and the verdict.

The engine is killed with -9 and frozen, Redis is restarted, the disk tier cannot write, the network of a quarter of
the clients stalls, others stop in the middle of a request. Every request must end with an answer or a clean error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.server_process import ServerProcess, started_server
from benchmarks.soak_clients import SoakClients
from benchmarks.soak_faults import (
    EngineFaults,
    FaultLog,
    StallingProxy,
    engine_pid,
    fill_disk,
    greedy_answer,
    restart_redis,
    stalled_clients,
)
from benchmarks.soak_verdict import Check, MemorySeries, as_json, by_minute, growth, table
from benchmarks.tenant_keys import key_of, write_keys

_TENANTS = tuple(f"tenant-{number}" for number in range(8))
_WATCHER = "watcher"  # a ninth key: probes and statistics
_STALL_TIMEOUT = 2.0
_BACK_LIMIT = 4.0  # seconds
_SAMPLE_SECONDS = 5.0
_GROWTH_LIMIT = 0.02  # of resident memory, from a third of the run to its end
_SHORT_GROWTH_LIMIT = 0.15  # of runs under half an hour, which never settle
_DRAIN_SECONDS = 30.0
_HANG_SECONDS = 300.0  # after the end, by which every client has its last answer
_MORE_WORKERS = 4  # helper processes that start when they are first needed
_FLAGS = (
    *("--context", "256", "--concurrency", "16", "--max-queued-requests", "64", "--memory", "24MiB", "--quiet"),
    *("--stall-timeout", str(_STALL_TIMEOUT), "--kv-disk-size", "64MiB"),
)


def run_chaos(options: argparse.Namespace) -> int:
    seconds = options.minutes * 60 if options.minutes else options.seconds
    with tempfile.TemporaryDirectory(prefix="tokenmill-soak-") as name, _redis(Path(name)) as redis:
        folder = Path(name)
        keys = write_keys(folder / "keys.json", (*_TENANTS, _WATCHER), {_WATCHER: {"metrics": True}})
        flags = [*_FLAGS, "--api-keys-file", str(keys), "--kv-disk", str(folder / "kv")]
        if redis is not None:
            flags += ["--kv-redis", redis.url]
        with started_server(options.model or "stories15m", *flags) as server:
            run = _Chaos(server, seconds, options.clients, options.seed, redis)
            result = asyncio.run(run.run())
            if not result["ok"]:
                result["log"] = server.log.read_text()[-4000:]
    print(result.pop("table"), file=sys.stderr if options.json else sys.stdout)
    print(json.dumps(result, indent=None if options.json else 1))
    return 0 if result["ok"] else 1


@contextlib.contextmanager
def _redis(folder: Path) -> Iterator[Any]:
    if shutil.which("redis-server") is None or importlib.util.find_spec("redis") is None:
        print("note: redis-server or the package redis is not installed, Redis is left out", file=sys.stderr)
        yield None
        return
    from tests.redis_server import RedisServer

    server = RedisServer(folder)
    try:
        yield server
    finally:
        server.stop()


class _Chaos:
    def __init__(self, server: ServerProcess, seconds: float, num_clients: int, seed: int, redis: Any) -> None:
        self._server = server
        self._seconds = seconds
        self._num_clients = num_clients
        self._seed = seed
        self._redis = redis
        self._clients = SoakClients(seconds, tolerant=True)
        self._memory = MemorySeries()

    async def run(self) -> dict[str, Any]:
        async with self._http(self._server.url, _WATCHER) as watcher:
            before = await greedy_answer(watcher)
            assert before is not None, "the server never answered"
            log = FaultLog()
            proxy = StallingProxy(self._server.url, log)
            async with proxy as slow_url:
                faults = self._start_faults(watcher, log, proxy, before)
                try:
                    async with asyncio.timeout(self._seconds + _HANG_SECONDS):
                        await self._run_clients(slow_url)
                except TimeoutError:
                    self._clients.problems.append("clients wait for ever")
                # Faults end by themselves: each restores what it took away.
                for ended in await asyncio.gather(*faults, return_exceptions=True):
                    if ended is not None:
                        self._clients.problems.append(f"a fault failed: {ended!r}")
            load = await _until_idle(watcher)
            after = await greedy_answer(watcher)
            metrics = (await watcher.get("/metrics")).text
        return self._verdict(log, load, metrics, before == after)

    def _http(self, url: str, tenant: str) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {key_of(tenant)}"}
        # Shorter than the server keeps idle connections, so that none is closed under a request.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=1.0)
        return httpx.AsyncClient(base_url=url, timeout=120, limits=limits, headers=headers)

    def _start_faults(
        self, watcher: httpx.AsyncClient, log: FaultLog, proxy: StallingProxy, expected: str
    ) -> list[asyncio.Task[None]]:
        until = time.monotonic() + self._seconds
        scale = min(1.0, self._seconds / 240)  # a short run has as many faults in less time
        pause = (12 * scale + 3, 40 * scale + 3)
        chance = [random.Random(f"{self._seed}-{number}") for number in range(6)]
        engine = EngineFaults(watcher, log, expected, _STALL_TIMEOUT)
        running = [
            self._watch_memory(watcher, until),
            engine.run(chance[0], pause, until - _BACK_LIMIT),
            fill_disk(watcher, log, chance[1], pause, until),
            proxy.run(chance[2], pause, until),
        ]
        running += [
            stalled_clients(self._server.url, key_of(_TENANTS[-1]), random.Random(number), until, self._count)
            for number in range(4)
        ]
        if self._redis is not None:
            running.append(restart_redis(self._redis, log, chance[3], pause, until))
        return [asyncio.create_task(each) for each in running]

    def _count(self, outcome: str) -> None:
        self._clients.outcomes[outcome] += 1

    async def _run_clients(self, slow_url: str) -> None:
        async with contextlib.AsyncExitStack() as stack:
            direct = [await stack.enter_async_context(self._http(self._server.url, name)) for name in _TENANTS]
            stalling = [await stack.enter_async_context(self._http(slow_url, name)) for name in _TENANTS]
            await asyncio.gather(
                *(
                    self._clients.run(
                        (stalling if number % 4 == 3 else direct)[number // 4 % len(_TENANTS)],
                        self._seed * 1000 + number,
                        stalls=number % 4 == 3,
                    )
                    for number in range(self._num_clients)
                )
            )

    async def _watch_memory(self, watcher: httpx.AsyncClient, until: float) -> None:
        while time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError):
                self._memory.sample(self._server.pid, await engine_pid(watcher))
            await asyncio.sleep(_SAMPLE_SECONDS)

    def _verdict(self, log: FaultLog, load: dict[str, Any], metrics: str, same: bool) -> dict[str, Any]:
        problems = Counter(self._clients.problems)
        slowest = max((each.back_seconds for each in log.recoveries), default=0.0)
        busy = {name: load[name] for name in ("server_load", "queued_requests", "requests_running") if load[name]}
        consistent = bool(load["kv_pages_consistent"])
        different = sum(not each.same_answer for each in log.recoveries) + (not same)
        checks = [
            Check("every request ended well", f"{sum(problems.values())} problems", "0", not problems),
            Check("nothing in flight at the end", str(busy or 0), "0", not busy),
            Check("no page leaked", f"{load['kv_pages_held']} held", "0", load["kv_pages_held"] == 0),
            Check("pages consistent", str(consistent), "True", consistent),
            Check("engine back (slowest), s", f"{slowest:.2f}", f"{_BACK_LIMIT:.0f}", slowest <= _BACK_LIMIT),
            Check("engine faults", str(len(log.recoveries)), ">= 1", bool(log.recoveries)),
            Check("greedy answer unchanged", f"{different} differ", "0", not different),
            Check("no internal error", str('status="500"' not in metrics), "True", 'status="500"' not in metrics),
            *self._memory_checks(),
        ]
        return {
            "ok": all(check.ok for check in checks),
            "clients": self._num_clients,
            "tenants": len(_TENANTS),
            "seconds": self._seconds,
            "requests": sum(self._clients.outcomes.values()),
            "checks": as_json(checks),
            "outcomes": dict(sorted(self._clients.outcomes.items())),
            "problems": dict(problems.most_common(10)),
            "faults": {
                "engine": dict(Counter(each.fault for each in log.recoveries)),
                "redis_restarts": log.redis_restarts,
                "disk_fills": log.disk_fills,
                "network_stalls": log.network_stalls,
            },
            "resident_mib_by_minute": {
                "server": by_minute(self._memory.server),
                "engine": by_minute(self._memory.engine),
                "others": by_minute(self._memory.others),
            },
            "recoveries": [asdict(each) for each in log.recoveries],
            "table": table(checks),
        }

    def _memory_checks(self) -> Iterator[Check]:
        limit = _GROWTH_LIMIT if self._seconds >= 1800 else _SHORT_GROWTH_LIMIT
        start = self._seconds / 3
        for name, series in (("server", self._memory.server), ("engine", self._memory.engine)):
            grown = growth(series, start, self._seconds)
            shown = "too few samples" if grown is None else f"{grown:+.2%}"
            # A short run may have no engine that lived long enough.
            yield Check(f"memory of the {name}", shown, f"{limit:+.0%}", grown is None or grown <= limit)
        more = self._memory.processes[-1] - self._memory.processes[0]
        yield Check("processes left behind", str(max(0, more)), str(_MORE_WORKERS), more <= _MORE_WORKERS)


async def _until_idle(http: httpx.AsyncClient) -> dict[str, Any]:
    end = time.monotonic() + _DRAIN_SECONDS
    while True:
        load: dict[str, Any] = (await http.get("/load")).json()
        busy = load["server_load"] or load["kv_pages_held"] or load["queued_requests"]
        if time.monotonic() > end or not (busy or not load["kv_pages_checked"]):
            return load
        await asyncio.sleep(0.2)
