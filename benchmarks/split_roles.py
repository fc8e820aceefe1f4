"""What long prompts do to running requests: one mixed server against a prefill and a decode server on the same cores.

    python benchmarks/split_roles.py smollm2 --prompt 1500 --seconds 40

Each run starts both arms, one after the other: one server with two threads, then two servers with one thread each, of
which the second sends long prompts to the first. A few requests stream tokens all the time, and long prompts that
nobody has seen before come at intervals. Printed are the times between two tokens of the streams, with and without the
long prompts, and the times to the first token of the long ones. Exit code 0 if the 99th percentile under interference
falls to at most --wanted of the mixed server's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.server_process import started_server


@dataclass
class Result:
    quiet: list[float] = field(default_factory=list)  # seconds between two tokens of a stream
    disturbed: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds to the first token of long prompts
    from_peer: int = 0  # tokens of long prompts
    sources: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of a long prompt")
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="of interference, in each arm")
    parser.add_argument("--pause", type=float, default=6.0, help="between two long prompts")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--wanted", type=float, default=0.5)
    parser.add_argument("--batch-tokens", default="auto", help="of every server")
    options = parser.parse_args()
    ratios = []
    print("| run | arm | between tokens, quiet p50 / p99, ms | disturbed p50 / p99 / most | first token, ms | peer |")
    print("|---|---|---|---|---|---|")
    for run in range(options.runs):
        worst = []
        for arm in ("mixed", "split"):
            with arm_servers(options, arm) as url:
                result = measure(options, url, run)
            worst.append(percentile(result.disturbed, 99))
            print(row(run, arm, result), flush=True)
        ratios.append(worst[1] / worst[0])
    ratio = statistics.median(ratios)
    print(
        f"\n99th percentile under interference: {ratio:.2f} of the mixed server's (wanted: at most {options.wanted:g})"
    )
    sys.exit(0 if ratio <= options.wanted else 1)


def row(run: int, arm: str, result: Result) -> str:
    quiet = [f"{1e3 * percentile(result.quiet, share):.0f}" for share in (50, 99)]
    disturbed = [f"{1e3 * percentile(result.disturbed, share):.0f}" for share in (50, 99, 100)]
    first = f"{1e3 * percentile(result.first, 50):.0f} ({len(result.first)} prompts)"
    peer = f"{result.from_peer} tokens, {', '.join(sorted(set(result.sources))) or '-'}"
    return f"| {run} | {arm} | {' / '.join(quiet)} | {' / '.join(disturbed)} | {first} | {peer} |"


@contextlib.contextmanager
def arm_servers(options: argparse.Namespace, arm: str) -> Iterator[str]:
    """The address that clients talk to."""
    common = ["--quiet", "--context", str(options.prompt + 1024), "--no-spare-engine", "--text-workers", "1"]
    common += ["--batch-tokens", options.batch_tokens]
    if arm == "mixed":
        with started_server(options.model, *common, "--threads", "2") as server:
            yield server.url
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = f"127.0.0.1:{listener.getsockname()[1]}"
    with tempfile.NamedTemporaryFile("w") as secret:
        secret.write("benchmark" * 4)
        secret.flush()
        common += ["--threads", "1", "--kv-secret-file", secret.name]
        with started_server(options.model, *common, "--role", "prefill", "--kv-listen", peer) as prefill:
            split = ["--role", "decode", "--kv-peer", peer, "--prefill-url", prefill.url, "--split-min-tokens", "256"]
            with started_server(options.model, *common, *split) as decode:
                yield decode.url


def measure(options: argparse.Namespace, url: str, run: int) -> Result:
    result, stop, disturbed = Result(), threading.Event(), threading.Event()
    threads = [
        threading.Thread(target=stream, args=(url, number, result, stop, disturbed), daemon=True)
        for number in range(options.streams)
    ]
    for thread in threads:
        thread.start()
    draw = random.Random(run)
    with httpx.Client(base_url=url, timeout=600) as client:
        ask(client, [draw.randrange(1000, 20_000) for _ in range(options.prompt)], Result())  # everybody is warm
        time.sleep(options.seconds / 4)
        disturbed.set()
        ends = time.monotonic() + options.seconds
        while time.monotonic() < ends:
            ask(client, [draw.randrange(1000, 20_000) for _ in range(options.prompt)], result)
            time.sleep(options.pause)
        stop.set()
    for thread in threads:
        thread.join(60)
    return result


def ask(client: httpx.Client, prompt: list[int], result: Result) -> None:
    began = time.perf_counter()
    answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "temperature": 0})
    result.first.append(time.perf_counter() - began)
    answer.raise_for_status()
    details = answer.json()["usage"]["prompt_tokens_details"]
    result.from_peer += details.get("tier_tokens", 0)
    if "kv_source" in details:
        result.sources.append(details["kv_source"])


def stream(url: str, number: int, result: Result, stop: threading.Event, disturbed: threading.Event) -> None:
    """Token after token, one request after the other."""
    body = {"max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    with httpx.Client(base_url=url, timeout=600) as client:
        while not stop.is_set():
            prompt = random.Random(number).choices(range(1000, 20_000), k=24)
            last = 0.0
            with client.stream("POST", "/v1/completions", json={**body, "prompt": prompt}) as answer:
                for line in answer.iter_lines():
                    if stop.is_set():
                        return
                    if not line.startswith("data: {") or not json.loads(line[6:])["choices"]:
                        continue
                    now = time.perf_counter()
                    if last:
                        (result.disturbed if disturbed.is_set() else result.quiet).append(now - last)
                    last = now


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values) or [float("nan")]
    return ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))]


if __name__ == "__main__":
    main()
