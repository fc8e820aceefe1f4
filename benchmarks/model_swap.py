"""Two models in one server where only one fits: what swapping costs, and what it loses.

    python benchmarks/model_swap.py [--models smollm2 gemma3-270m] [--limit 2GiB] [--memory 800MiB] [--seconds 20]

First the time to a token from four states of a model: a server that must be started for it (cold), a process that must
be started again (unloaded), asleep, and loaded. Then clients ask for both models at once, each as fast as it is
answered; the memory of all processes of the server is watched (PSS, which counts shared pages once). Prints the ratios
and exits 1 if a request was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.server_process import started_server

_ROUNDS = 5
_PROMPT = "The sky is blue because"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs=2, default=["smollm2", "gemma3-270m"], metavar="MODEL")
    parser.add_argument("--limit", default="2GiB", help="memory of the whole server")
    parser.add_argument("--memory", default="800MiB", help="KV cache of each model")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--clients", type=int, default=4, help="of each model")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--seconds", type=float, default=20.0, help="of load")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.yaml"
        shared = {"context": options.context, "memory": options.memory, "access_log": False, "text_workers": 1}
        file.write_text(yaml.safe_dump({**shared, "memory_limit": options.limit, "models": options.models}))
        flags = ("--context", str(options.context), "--memory", options.memory, "--no-access-log")
        for model in options.models:
            _print_starts(model, file, flags)
        return _swap(file, options)


def _ask(url: str, model: str, num_tokens: int = 1) -> float:
    began = time.monotonic()
    body = {"model": model, "prompt": _PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status()
    return time.monotonic() - began


def _print_starts(model: str, file: Path, flags: tuple[str, ...]) -> None:
    """Seconds to one token, by the state the model is in."""
    cold = []
    for _ in range(3):
        began = time.monotonic()
        with started_server(model, *flags) as server:
            _ask(server.url, model)
            cold.append(time.monotonic() - began)
    found: dict[str, list[float]] = {"unloaded": [], "asleep": [], "loaded": []}
    with started_server(f"--config={file}") as server:
        for _ in range(_ROUNDS):
            for state, level in (("unloaded", 2), ("asleep", 1), ("loaded", 0)):
                _ask(server.url, model)
                if level:
                    params = {"level": level, "model": model}
                    httpx.post(f"{server.url}/sleep", params=params, timeout=60).raise_for_status()
                found[state].append(_ask(server.url, model))
    start, asleep = statistics.median(cold), statistics.median(found["asleep"])
    print(f"{model}: seconds to a token")
    print(f"  cold start of a server {start:8.3f}   {start / asleep:6.1f} x asleep")
    for state, times in found.items():
        median = statistics.median(times)
        print(f"  {state:<22} {median:8.3f}   {median / asleep:6.1f} x asleep")


class _Watch:
    """The most memory that the server and its processes took together, looked at ten times a second."""

    def __init__(self, pid: int) -> None:
        self.most = 0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.most

    def _look(self) -> None:
        while not self._ended.wait(0.1):
            self.most = max(self.most, sum(map(_proportional_bytes, _family(self._pid))))


def _family(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in task.read_text().split():
                found += _family(int(child))
        except OSError:
            continue
    return found


def _proportional_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


async def _load(url: str, options: argparse.Namespace) -> list[tuple[str, int, float]]:
    """(model, status, seconds) of every request."""
    until = time.monotonic() + options.seconds
    done: list[tuple[str, int, float]] = []

    async def client(model: str, http: httpx.AsyncClient) -> None:
        body: dict[str, Any] = {"model": model, "prompt": _PROMPT, "max_tokens": options.tokens, "ignore_eos": True}
        while time.monotonic() < until:
            began = time.monotonic()
            try:
                status = (await http.post("/v1/completions", json=body)).status_code
            except httpx.HTTPError:
                status = 0
            done.append((model, status, time.monotonic() - began))

    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        await asyncio.gather(*(client(model, http) for model in options.models for _ in range(options.clients)))
    return done


def _swap(file: Path, options: argparse.Namespace) -> int:
    with started_server(f"--config={file}") as server:
        watch = _Watch(server.pid)
        done = asyncio.run(_load(server.url, options))
        most = watch.stop()
        metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    loads = [line for line in metrics.splitlines() if line.startswith("tokenmill_model_loads_total{")]
    swaps = sum(float(line.rpartition(" ")[2]) for line in loads)
    lost = sum(status != 200 for _, status, _ in done)
    print(f"both at once for {options.seconds:.0f} s, limit {options.limit}, {options.clients} clients each")
    for model in options.models:
        times = sorted(seconds for name, status, seconds in done if name == model and status == 200)
        tail = times[int(0.99 * (len(times) - 1))]
        print(f"  {model}: {len(times)} answers, median {statistics.median(times):.2f} s, p99 {tail:.2f} s")
    print(f"  {swaps:.0f} loads and wakes; most memory of all processes {most / 2**30:.2f} GiB")
    print(f"  lost: {lost} of {len(done)} requests {dict(Counter(status for _, status, _ in done))}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
