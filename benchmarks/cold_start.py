"""Time to the first token of a server that did not run, split into its parts: what a scale-up costs.

    python benchmarks/cold_start.py [--model smollm2] [--rounds 3] [--warm] [--json FILE] [SERVER FLAGS]

Each round starts `tokenmill serve` in a process of its own, as a pod or a Ray replica does, and asks for one streamed
token as soon as it is ready. Between rounds the pages of the weight files are dropped from the page cache (--warm keeps
them), so that weights come from the disk; libraries stay cached. Rounds with and without --read-ahead take turns, so
that both see the same machine. Prints medians of each part in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import time
from pathlib import Path

import httpx

from benchmarks.server_process import started_server
from tokenmill.checkpoint.read_ahead import weight_files
from tokenmill.checkpoint.sources import resolve

_PHASE = re.compile(r"^([a-z ]+): ([0-9.]+) s$", re.MULTILINE)
_READY = re.compile(r"^ready in ([0-9.]+) s", re.MULTILINE)
_PARTS = {  # phases that the server reports, and what happens in them
    "finding the model": "finding the model",
    "starting the engine": "engine process: start, imports",
    "loading the weights": "engine process: weights",
    "warming up": "engine process: warm-up",
    "opening the port": "opening the port",
}
_FIRST, _TOKEN, _TOTAL = "server process: start, imports", "first token", "in all"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind")
    parser.add_argument("--warm", action="store_true", help="leave the weights in the page cache")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rounds here")
    arguments, flags = parser.parse_known_args()
    path = resolve(arguments.model).path
    size = sum(each.stat().st_size for each in weight_files(path))
    print(f"{arguments.model}: {size / 1e6:.0f} MB of weights, {'in the page cache' if arguments.warm else 'on disk'}")
    found: dict[str, list[dict[str, float]]] = {"--read-ahead": [], "--no-read-ahead": []}
    for _ in range(arguments.rounds):
        for kind, rounds in found.items():
            if not arguments.warm:
                drop(path)
            rounds.append(start(str(path), kind, *flags))
    print_table(found)
    if arguments.json:
        arguments.json.write_text(json.dumps({"bytes": size, "rounds": found}, indent=1))
    return 0


def drop(path: Path) -> None:
    """Clean pages that nobody has mapped leave the page cache at once."""
    for each in weight_files(path):
        number = os.open(each, os.O_RDONLY)
        try:
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(number)


def start(model: str, *flags: str) -> dict[str, float]:
    began = time.monotonic()
    with started_server(model, "--no-access-log", "--no-spare-engine", *flags) as server:
        ready = time.monotonic()
        seconds = {_TOKEN: first_token(server.url)}
        log = server.log.read_text()
    phases = {name: float(value) for name, value in _PHASE.findall(log)}
    reported = _READY.search(log)
    assert reported is not None, log
    parts = {_FIRST: ready - began - float(reported[1])}
    parts |= {shown: phases.get(name, 0.0) for name, shown in _PARTS.items()}
    return parts | seconds | {_TOTAL: ready - began + seconds[_TOKEN]}


def first_token(url: str) -> float:
    began = time.monotonic()
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "The sky is blue because", "max_tokens": 2, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            next(line for line in answer.iter_lines() if line.startswith("data: {"))
            return time.monotonic() - began


def print_table(found: dict[str, list[dict[str, float]]]) -> None:
    print(f"{'part':34s}" + "".join(f"{kind:>18s}" for kind in found))
    for part in next(iter(found.values()))[0]:
        medians = [statistics.median(each[part] for each in rounds) for rounds in found.values()]
        print(f"{part:34s}" + "".join(f"{median:18.2f}" for median in medians))


if __name__ == "__main__":
    raise SystemExit(main())
