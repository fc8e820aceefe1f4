"""A long run of misbehaving clients against one server; ends with a verdict and exit code 0 or 1.

    python benchmarks/soak.py smollm2 [--clients 64] [--seconds 300] [--seed 0] [--json]
    python benchmarks/soak.py --minutes 60 --chaos


Clients stream, wait, cancel, read slowly, hang up, send bad JSON, bad schemas and prompts that are too long. It must
hold that every request gets an answer (or was left by its own client), that pages and requests return to zero with the
page invariant intact, that memory of both processes stays flat, and that the server answers as it did before. KV memory
is small, so that pages are evicted and sequences preempted, and all of it has been touched early in the run. With
--chaos, faults strike as well (soak_chaos.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.server_process import started_server
from benchmarks.soak_chaos import run_chaos
from benchmarks.soak_clients import CONTEXT, PROBE, SoakClients
from benchmarks.soak_verdict import resident

_FLAT = 1.15  # memory at the end against memory after the first third


async def soak(url: str, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.clients)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        before = (await http.post("/v1/completions", json=PROBE)).json()["choices"][0]["text"]
        run = SoakClients(options.seconds)
        memory: list[int] = []
        watching = asyncio.create_task(_watch_memory(http, pid, memory))
        await asyncio.gather(*(run.run(http, options.seed * 1000 + number) for number in range(options.clients)))
        watching.cancel()
        load = await _until_idle(http)
        metrics = (await http.get("/metrics")).text
        after = (await http.post("/v1/completions", json=PROBE)).json()["choices"][0]["text"]
    third = memory[len(memory) // 3] if memory else 0
    last = memory[-1] if memory else 0
    checks = {
        "every_request_answered": not run.problems,
        "nothing_left_in_flight": not (load["server_load"] or load["queued_requests"] or load["requests_running"]),
        "no_page_held": load["kv_pages_held"] == 0,
        "pages_consistent": bool(load["kv_pages_consistent"]),
        "memory_flat": last <= _FLAT * third,
        "no_5xx": 'status="5' not in metrics,
        "same_answer_as_before": before == after,
    }
    return {
        "ok": all(checks.values()),
        "clients": options.clients,
        "seconds": options.seconds,
        "requests": sum(run.outcomes.values()),
        "checks": checks,
        "outcomes": dict(sorted(run.outcomes.items())),
        "problems": dict(Counter(run.problems).most_common(10)),
        "rss_bytes_third": third,
        "rss_bytes_end": last,
    }


async def _watch_memory(http: httpx.AsyncClient, pid: int, samples: list[int]) -> None:
    """Resident memory of the server and its engine, once a second."""
    while True:
        engine = (await http.get("/load")).json()["engine_pid"]
        samples.append(sum(resident(each) for each in (pid, engine) if each))
        await asyncio.sleep(1)


async def _until_idle(http: httpx.AsyncClient) -> dict[str, Any]:
    for _ in range(100):
        load: dict[str, Any] = (await http.get("/load")).json()
        if not load["server_load"] and not load["kv_pages_held"]:
            break
        await asyncio.sleep(0.2)
    return load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="smollm2; with --chaos stories15m")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--minutes", type=float, default=0.0, help="instead of --seconds")
    parser.add_argument("--chaos", action="store_true", help="kill, freeze, fill and stall while clients run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.chaos:
        return run_chaos(options)
    options.seconds = options.minutes * 60 or options.seconds
    flags = (
        "--context",
        str(CONTEXT),
        "--concurrency",
        "16",
        "--max-num-queued-reqs",
        "32",
        "--quiet",
        "--memory",
        "160MiB",
    )
    with started_server(options.model or "smollm2", *flags) as server:
        result = asyncio.run(soak(server.url, server.pid, options))
        if not result["ok"]:
            result["log"] = server.log.read_text()[-4000:]
    print(json.dumps(result, indent=None if options.json else 1))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
