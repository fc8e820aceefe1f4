"""Does the router find what replicas have cached, and does the simulator say so beforehand? Replays a Mooncake trace.

    python benchmarks/router.py TRACE [--requests 600] [--speedup 2] [--policies least_wait round_robin] [--json]

Four real servers of a tiny random model (made here), one real router, and the simulator with the same trace, the same
number of pages and step costs measured on these servers. Lengths are divided by `--divide` (default 32), so that a
block of 512 tokens of the trace is a page of 16: which pages are shared is as in the trace, only smaller. `--pages`
bounds the cache of each server, so that pages are evicted. Hit rate: prompt tokens that came from the prefix cache, of
all prompt tokens, as the servers report them. The trace's clock has steps of 3 s and requests of one moment reach a
router in any order, which moves the hit rate by points: the simulator is asked for several orders, the mean and the
range are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx

from benchmarks.server_process import started_server
from tokenmill.bench.serve_traces import prompt_maker
from tokenmill.bench.trace_rows import BLOCK_TOKENS
from tokenmill.hardware.kv_layout import KVGroup, KVLayout
from tokenmill.plan.simulate.cluster import Cluster, ClusterSettings, PoolSettings
from tokenmill.plan.simulate.engine_shape import EngineShape
from tokenmill.plan.simulate.traces import open_trace
from tokenmill.plan.simulate.workload import Arrival, Workload

_VOCAB, _CONTEXT, _SLOTS = 1024, 4096, 16
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": _VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": _CONTEXT,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
_PAGE_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # tokens x layers x (K, V) x heads x head size x float32


class LinearCost:
    """Seconds of a step as measured here: a fixed part, and one for each prompt token and each decode."""

    def __init__(self, step: float, prompt_token: float) -> None:
        self._step = step
        self._prompt_token = prompt_token

    def step_ms(self, prefill: Sequence[tuple[int, int]], decode: tuple[int, float]) -> float:
        return 1e3 * (
            self._step * (bool(prefill) or decode[0] > 0) + self._prompt_token * sum(new for new, _ in prefill)
        )


def main() -> None:
    options = _arguments()
    arrivals = _arrivals(options)
    found: dict[str, Any] = {"requests": len(arrivals), "prompt_tokens": sum(each.prompt_tokens for each in arrivals)}
    with tempfile.TemporaryDirectory(prefix="tokenmill-router-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_CONFIG))
        for policy in options.policies:
            found[policy] = _measure(folder, policy, arrivals, options)
    first, last = (found[options.policies[each]]["measured"] for each in (0, -1))
    found["times"] = round(first / last, 2) if last else None
    print(json.dumps(found) if options.json else _lines(found, options))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--divide", type=int, default=32)
    parser.add_argument("--speedup", type=float, default=2.0)
    parser.add_argument("--pages", type=int, default=2500, help="of each replica")
    parser.add_argument("--policies", nargs="+", default=["least_wait", "round_robin"])
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _arrivals(options: argparse.Namespace) -> list[Arrival]:
    divide, most = options.divide, _CONTEXT - 64
    rows = islice(open_trace(options.trace).arrivals(), options.requests)
    return [
        replace(
            each,
            ms=each.ms / options.speedup,
            prompt_tokens=min(most, max(1, each.prompt_tokens // divide)),
            output_tokens=max(1, min(64, each.output_tokens // divide)),
            block_tokens=BLOCK_TOKENS // divide,
        )
        for each in rows
    ]


# --- measured ---


@contextlib.contextmanager
def _router(urls: list[str], policy: str) -> Iterator[str]:
    named = [word for url in urls for word in ("--replica", url)]
    command = [
        sys.executable,
        "-m",
        "tokenmill",
        "route",
        "--port",
        "0",
        "--json",
        "--quiet",
        "--policy",
        policy,
        *named,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def _measure(folder: str, policy: str, arrivals: list[Arrival], options: argparse.Namespace) -> dict[str, Any]:
    flags: tuple[str, ...] = (
        "--load-format",
        "dummy",
        "--page-size",
        "16",
        "--context",
        str(_CONTEXT),
        "--concurrency",
        str(_SLOTS),
    )
    flags += ("--memory", str(options.pages * _PAGE_BYTES), "--threads", "1", "--no-spare-engine", "--quiet")
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(started_server(folder, *flags)).url for _ in range(options.replicas)]
        cost, num_pages = _probe(urls[0])
        url = stack.enter_context(_router(urls, policy))
        before = [_load(each) for each in urls]
        began = time.monotonic()
        failed = asyncio.run(_replay(url, arrivals))
        seconds = time.monotonic() - began
        after = [_load(each) for each in urls]
    queries, hits = (sum(b[name] - a[name] for a, b in zip(before, after, strict=True)) for name in _COUNTS)
    simulated = [_simulate(policy, _shuffled(arrivals, seed), options.replicas, num_pages, cost) for seed in range(8)]
    return {
        "measured": round(100 * hits / max(1, queries), 2),
        "simulated": round(100 * fmean(simulated), 2),
        "range": [round(100 * each, 2) for each in (min(simulated), max(simulated))],
        "failed": failed,
        "seconds": round(seconds, 1),
        "pages": num_pages,
        "by_replica": [b["query_tokens"] - a["query_tokens"] for a, b in zip(before, after, strict=True)],
    }


_COUNTS = ("query_tokens", "hit_tokens")


def _load(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/v1/replica/events", timeout=30).json()["load"]
    return found


def _probe(url: str) -> tuple[LinearCost, int]:
    """Costs of this machine's steps, and the pages of a server."""
    with httpx.Client(base_url=url, timeout=60) as http:
        for number in range(8):
            ids = [(number * 131 + place * 7) % _VOCAB for place in range(1024)]
            http.post("/v1/completions", json={"prompt": ids, "max_tokens": 1, "ignore_eos": True})
        each = _load(url)["prompt_token_seconds"]
        began = time.perf_counter()
        http.post("/v1/completions", json={"prompt": [7], "max_tokens": 200, "ignore_eos": True})
        step = (time.perf_counter() - began) / 200
        return LinearCost(step, each), http.get("/load").json()["kv_pages_total"]


async def _replay(url: str, arrivals: list[Arrival]) -> int:
    """Open loop; how many did not get an answer."""
    make = prompt_maker(_VOCAB, arrivals[0].block_tokens, 0)
    failed = 0

    async def send(each: Arrival) -> None:
        nonlocal failed
        ids = make(each.number, each.prompt_tokens, each.blocks)
        body = {"prompt": ids, "max_tokens": each.output_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        answer = await http.post("/v1/completions", json=body)
        failed += answer.status_code != 200 or not answer.text.rstrip().endswith("[DONE]")

    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=None)) as http:
        began, sending = time.monotonic(), []
        for each in arrivals:
            await asyncio.sleep(max(0.0, began + each.ms / 1e3 - time.monotonic()))
            sending.append(asyncio.create_task(send(each)))
        await asyncio.gather(*sending)
    return failed


# --- simulated ---


def _shuffled(arrivals: list[Arrival], seed: int) -> list[Arrival]:
    """Requests of one moment in another order."""
    shuffle = random.Random(seed).shuffle
    found: list[Arrival] = []
    for _, group in groupby(arrivals, key=lambda each: each.ms):
        together = list(group)
        shuffle(together)
        found += together
    return [replace(each, number=number) for number, each in enumerate(found)]


def _simulate(policy: str, arrivals: list[Arrival], replicas: int, num_pages: int, cost: LinearCost) -> float:
    layout = KVLayout(16, 2, 2, 16, (KVGroup("full", 0, (0, 1)),))
    shape = EngineShape(layout, num_pages, 512, _SLOTS, _CONTEXT)
    settings = ClusterSettings(PoolSettings(shape, cost, replicas), policy)
    records = Cluster(settings, Workload("trace", lambda: iter(arrivals))).run()
    total = sum(each.arrival.prompt_tokens for each in records.finished)
    return sum(each.cached for each in records.finished) / max(1, total)


def _lines(found: dict[str, Any], options: argparse.Namespace) -> str:
    shown = [f"{found['requests']} requests, {found['prompt_tokens']} prompt tokens, {options.replicas} replicas"]
    shown += [
        f"{name:<14}{'hit rate':>10}{'simulated':>11}{'range':>15}{'failed':>8}{'seconds':>9}" for name in ("policy",)
    ]
    for policy in options.policies:
        row = found[policy]
        between = f"{row['range'][0]:.1f} to {row['range'][1]:.1f}"
        shown.append(
            f"{policy:<14}{row['measured']:>8.1f} %{row['simulated']:>9.1f} %{between:>15}"
            f"{row['failed']:>8}{row['seconds']:>9.1f}"
        )
    return "\n".join(
        [*shown, f"{options.policies[0]} has {found['times']} times the hit rate of {options.policies[-1]}"]
    )


if __name__ == "__main__":
    main()
