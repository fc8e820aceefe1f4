"""How much sooner a restarted server answers a long shared prefix with the disk tier than by computing it.

    python benchmarks/disk_tier.py smollm2 --tokens 2000

Each run starts a server three times: without a tier, with an empty one (which fills it), and with the filled one. Every
time the first request has the same prefix and a question of its own; its time to the one token it asks for is the
measure. Exit code 0 if the median ratio is at least --wanted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.server_process import started_server

_QUESTION_TOKENS = 16
_SETTLE_SECONDS = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2000, help="length of the shared prefix")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--wanted", type=float, default=5.0, help="ratio to reach")
    parser.add_argument("--kv-cache-dtype", default="auto")
    options = parser.parse_args()
    flags = ("--quiet", "--context", str(options.tokens + 256), "--kv-cache-dtype", options.kv_cache_dtype)
    ratios = []
    print("| run | computed, ms | with an empty tier, ms | from disk, ms | tokens from disk | ratio |")
    print("|---|---|---|---|---|---|")
    for run in range(options.runs):
        draw = random.Random(run)
        prefix = [draw.randrange(1000, 20_000) for _ in range(options.tokens)]
        with tempfile.TemporaryDirectory(prefix="tokenmill-kv-") as folder:
            disk = (*flags, "--kv-disk", folder)
            computed, _ = first_answer(options.model, flags, prefix, draw)
            filling, _ = first_answer(options.model, disk, prefix, draw)
            loaded, tokens = first_answer(options.model, disk, prefix, draw)
        ratios.append(computed / loaded)
        print(f"| {run} | {computed:.0f} | {filling:.0f} | {loaded:.0f} | {tokens} | {ratios[-1]:.1f} |", flush=True)
    median = statistics.median(ratios)
    print(f"\nmedian: {median:.1f} times sooner (wanted: {options.wanted:g})")
    sys.exit(0 if median >= options.wanted else 1)


def first_answer(model: str, flags: tuple[str, ...], prefix: list[int], draw: random.Random) -> tuple[float, int]:
    """(milliseconds of the first request after a start, tokens that came from a tier). Pages are saved at shutdown."""
    question = [draw.randrange(1000, 20_000) for _ in range(_QUESTION_TOKENS)]
    with started_server(model, *flags) as server, httpx.Client(base_url=server.url, timeout=600) as client:
        body = {"prompt": prefix + question, "max_tokens": 1, "temperature": 0}
        began = time.perf_counter()
        answer = client.post("/v1/completions", json=body)
        seconds = time.perf_counter() - began
        answer.raise_for_status()
        if "--kv-disk" in flags:
            wait_for_pages(client)
        return 1000 * seconds, answer.json()["usage"]["prompt_tokens_details"].get("tier_tokens", 0)


def wait_for_pages(client: httpx.Client) -> None:
    """Wait until all pages are written in idle moments: the tier no longer grows."""
    before, deadline = -1.0, time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < deadline:
        lines = client.get("/metrics").text.splitlines()
        now = sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("tokenmill_kv_tier_bytes{"))
        if now == before and now > 0:
            return
        before = now
        time.sleep(0.5)


if __name__ == "__main__":
    main()
