"""tokenmill against llama-server over HTTP: the same file, threads, slots and requests, one after the other in turns.

    PATH=$(python benchmarks/peers/build_llamacpp.py):$PATH
    python benchmarks/cpu_serving_vs_llamacpp.py smollm2 [FILE.gguf ...] [--threads 2] [--repeat 3] [--loads plain]

Each turn starts one server, warms it with two requests, sends the load with `tokenmill bench serve` and stops it. Both
have 16 slots with KV cells of their own and batch as they choose. `prefix`: 64 requests, 512 tokens in common and 200
more in, 64 out, 16 at a time. `plain`: 64 requests of 512 in, 64 out, nothing in common. `short`: 16 in, 128 out.
Medians of output tokens per second, and of the medians of the time to first token and between tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx

from benchmarks.server_process import started_server
from tokenmill.checkpoint.sources import resolve

_SLOTS, _CONTEXT = 16, 1024
_LOADS = {"prefix": (512, 200, 64), "plain": (0, 512, 64), "short": (0, 16, 128)}  # in common, in, out
_SHOWN = {"output_throughput": "tok/s", "median_ttft_ms": "TTFT ms", "median_itl_ms": "ITL ms"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+", help="alias or .gguf")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--loads", nargs="+", choices=[*_LOADS], default=["prefix", "plain"])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    if shutil.which("llama-server") is None:
        parser.error("llama-server is not on the PATH: see benchmarks/peers/build_llamacpp.py")
    found = {model: _measure(str(resolve(model).path), options) for model in options.model}
    if options.json:
        print(json.dumps(found))


def _measure(path: str, options: argparse.Namespace) -> dict[str, Any]:
    servers: dict[str, Callable[[], AbstractContextManager[str]]] = {
        "llama.cpp": lambda: _llama_server(path, options.threads),
        "tokenmill": lambda: _ours(path, options.threads),
    }
    found: dict[str, Any] = {}
    for load in options.loads:
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        for _ in range(options.repeat):
            for name, start in servers.items():
                with start() as url:
                    rows[name].append(_run(url, load, options.requests))
        medians = {name: {key: statistics.median(each[key] for each in rows[name]) for key in _SHOWN} for name in rows}
        ratio = medians["tokenmill"]["output_throughput"] / medians["llama.cpp"]["output_throughput"]
        found[load] = {**medians, "ratio": ratio}
        for name, values in medians.items():
            shown = "  ".join(f"{values[key]:8.1f} {unit}" for key, unit in _SHOWN.items())
            print(f"{Path(path).name} {load:7} {name:10} {shown}", file=sys.stderr)
        print(f"{Path(path).name} {load:7} ratio {ratio:.2f}", file=sys.stderr)
    return found


def _run(url: str, load: str, requests: int) -> dict[str, float]:
    common, length, output = _LOADS[load]
    command = [sys.executable, "-m", "tokenmill", "bench", "serve", "--base-url", url, "--dataset-name", "random"]
    command += ["--random-prefix-len", str(common), "--random-input-len", str(length)]
    command += ["--random-output-len", str(output), "--num-prompts", str(requests), "--max-concurrency", str(_SLOTS)]
    command += ["--num-warmups", "2", "--prompt-format", "ids", "--vocab-size", "32000", "--ignore-eos"]
    command += ["--temperature", "0", "--disable-tqdm", "--json"]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    if report["completed"] != requests or report["total_output_tokens"] != requests * output:
        raise SystemExit(f"{url} answered {report['completed']} of {requests} requests in full")
    return {key: float(report[key]) for key in _SHOWN}


@contextlib.contextmanager
def _ours(path: str, threads: int) -> Iterator[str]:
    flags = ("--threads", str(threads), "--concurrency", str(_SLOTS), "--context", str(_CONTEXT), "--quiet")
    with started_server(path, *flags) as server:
        yield server.url


@contextlib.contextmanager
def _llama_server(path: str, threads: int) -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = ["llama-server", "--model", path, "--port", str(port), "--threads", str(threads), "--no-kv-unified"]
    command += ["--parallel", str(_SLOTS), "--ctx-size", str(_SLOTS * _CONTEXT), "--log-disable"]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait(url, process)
            yield url
        finally:
            process.terminate()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"llama-server ended with {process.returncode}")


if __name__ == "__main__":
    main()
