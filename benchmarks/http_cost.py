"""What HTTP adds to a token: milliseconds between tokens over HTTP and in the offline loop, on the same work.

    python benchmarks/http_cost.py MODEL [--streams 1,4,16] [--requests 8] [--input-len 300] [--output-len 128]
                                   [--shape 8b] [--repeat 3] [-- ENGINE FLAGS]

Each of `--streams` clients sends one request after the other and reads its stream from a plain socket; the offline loop
computes the same prompts with as many sequences at once, so both sides pay for the same prefills between tokens. The
server and the offline engine are processes of their own, one after the other (both would not fit a GPU), each warmed up
first. Medians over requests of the mean time between tokens. `--shape 8b` makes up weights of Llama-3.1-8B's shape.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_vs_vllm import write_model
from benchmarks.server_process import started_server
from tokenmill import LLM, SamplingParams

_WARM_SECONDS = 240.0
_QUIET_SECONDS = 3.0  # an idle engine that answers at once for so long has captured what it captures ahead


def main() -> None:
    options = _arguments()
    if options.offline:
        print(json.dumps(_offline(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.shape:
            options.model = str(write_model(Path(folder) / "shape"))
            options.flags += ["--load-format", "dummy"]
        served = _served(options)
        for streams in options.streams.split(","):
            options.streams = streams
            command = [sys.executable, __file__, *_repeat(options), "--offline", options.model, "--", *options.flags]
            offline = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
            ours, loop = served[streams], offline[streams]
            row = {"streams": int(streams), "served_ms": ours, "offline_ms": loop, "added_ms": ours - loop}
            print(json.dumps({name: round(value, 3) for name, value in row.items()}), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--requests", type=int, default=8, help="of each stream")
    parser.add_argument("--input-len", type=int, default=300)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--shape", choices=("8b",))
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:split])
    options.flags = given[split + 1 :]
    return options


def _repeat(options: argparse.Namespace) -> list[str]:
    names = ("streams", "requests", "input_len", "output_len", "repeat")
    return [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]


def _prompts(options: argparse.Namespace, streams: int, seed: int) -> list[list[list[int]]]:
    choose = random.Random(seed)
    return [
        [[choose.randrange(10, 30000) for _ in range(options.input_len)] for _ in range(options.requests)]
        for _ in range(streams)
    ]


def _offline(options: argparse.Namespace) -> dict[str, float]:
    values = iter(options.flags)
    settings: dict[str, Any] = {flag.removeprefix("--").replace("-", "_"): _value(next(values)) for flag in values}
    result: dict[str, float] = {}
    for streams in map(int, options.streams.split(",")):
        # As many sequences at once as there are streams: the next prompt starts when one has ended.
        with LLM(options.model, **settings, concurrency=streams, prefix_caching=False) as llm:
            llm.warm_up()
            times = []
            for number in range(options.repeat + 1):
                prompts = [each for stream in _prompts(options, streams, number) for each in stream]
                params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=options.output_len)
                outputs = llm.generate(prompts, params)
                if number:
                    times += [(each.metrics.last_token or 0.0) - (each.metrics.first_token or 0.0) for each in outputs]
        result[str(streams)] = 1e3 * statistics.median(times) / (options.output_len - 1)
    return result


def _value(text: str) -> str | int:
    return int(text) if text.isdigit() else text


def _served(options: argparse.Namespace) -> dict[str, float]:
    result: dict[str, float] = {}
    with started_server(options.model, *options.flags, "--no-prefix-caching") as server:
        address = urlsplit(server.url)
        place = (str(address.hostname), int(address.port or 80))
        asyncio.run(_load(place, _prompts(options, 2, 99), 8))
        wait_quiet(place)
        for streams in map(int, options.streams.split(",")):
            times: list[float] = []
            for number in range(options.repeat + 1):
                measured = asyncio.run(_load(place, _prompts(options, streams, number), options.output_len))
                times += measured if number else []
            result[str(streams)] = 1e3 * statistics.median(times) / (options.output_len - 1)
    return result


def wait_quiet(place: tuple[str, int]) -> None:
    """Until an idle engine is done with what it prepares: health checks then take no time."""
    end = time.monotonic() + _WARM_SECONDS
    quiet_since = time.monotonic()
    while time.monotonic() < end and time.monotonic() - quiet_since < _QUIET_SECONDS:
        began = time.monotonic()
        asyncio.run(_get(place, "/health"))
        if time.monotonic() - began > 0.05:
            quiet_since = time.monotonic()
        time.sleep(0.05)


async def _get(place: tuple[str, int], path: str) -> None:
    reader, writer = await asyncio.open_connection(*place)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {place[0]}\r\nConnection: close\r\n\r\n".encode())
    await reader.read()
    writer.close()


async def _load(place: tuple[str, int], prompts: list[list[list[int]]], output_len: int) -> list[float]:
    """Seconds from the first to the last token of each request."""

    async def stream(own: list[list[int]]) -> list[float]:
        reader, writer = await asyncio.open_connection(*place)
        times = []
        for prompt in own:
            body = {"prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True, "stream": True}
            data = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {place[0]}\r\nContent-Length: {len(data)}\r\n"
            writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
            times.append(await _read_stream(reader))
        writer.close()
        return times

    return [each for own in await asyncio.gather(*map(stream, prompts)) for each in own]


async def _read_stream(reader: asyncio.StreamReader) -> float:
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head.splitlines()[0], head
    first = last = 0.0
    while True:
        size = int(await reader.readline(), 16)
        chunk = await reader.readexactly(size + 2)
        if not size:
            return last - first
        if b'"text"' in chunk:
            last = time.perf_counter()
            first = first or last


if __name__ == "__main__":
    main()
