"""tokenmill against llama.cpp on the same file, the same threads, in the same run.

    pip install llama-cpp-python        # compiles for about twenty minutes
    python benchmarks/cpu_vs_llamacpp.py smollm2 [--threads 2] [--repeat 3] [--json]

Runs of both are interleaved (peer, ours, peer, ours, ...) and medians compared, so that a noisy machine disturbs both
alike. Prefill of 512 and of 4,096 tokens, decode of 128 at batch 1, batched decode after 16 tokens and (batch 16) after
512, and 64 requests at concurrency 16 with a common prefix of 512 tokens (200 more in, 64 out). llama.cpp runs as its
own server starts it (peers/llamacpp_peer.py).
`--quick` takes fewer decode steps and 16 instead of 64 requests: all of them are then new to llama.cpp's slots, which
keep a prefix only after their first request, so that row flatters us. Do not publish it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peers.peer_process import PeerProcess
from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.sources import resolve

Pair = tuple[Callable[[], float], Callable[[], float]]  # llama.cpp's run and ours


class Ours:
    """The same measurements on our engine, through the Python API."""

    def __init__(self, path: Path, threads: int) -> None:
        options = {"device": "cpu", "threads": threads, "context": 4352, "memory": "4GiB"}
        self._plain = LLM(path, prefix_caching=False, concurrency=32, **options)
        self._served = LLM(path, concurrency=16, **options)

    def prefill(self, tokens: list[int]) -> float:
        output = self._plain.generate([tokens], _greedy(1))[0]
        assert output.metrics.ttft is not None
        return len(tokens) / output.metrics.ttft

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        outputs = self._plain.generate(prompts, _greedy(steps + 1))
        # All prompts fit into one step, so every sequence gets its first token in the same step.
        first = max(output.metrics.first_token or 0.0 for output in outputs)
        last = max(output.metrics.last_token or 0.0 for output in outputs)
        return len(prompts) * steps / (last - first)

    def decode_held(self, prompts: list[list[int]], steps: int) -> float:
        """As `decode`, of prompts whose pages are in the cache: computed beforehand, so that all begin in one step."""
        self._served.generate(prompts, _greedy(1))
        outputs = self._served.generate(prompts, _greedy(steps + 1))
        first = min(output.metrics.first_token or 0.0 for output in outputs)  # a late prompt counts against us
        last = max(output.metrics.last_token or 0.0 for output in outputs)
        return len(prompts) * steps / (last - first)

    def serve(self, prefix: list[int], tails: list[list[int]], output: int) -> float:
        prompts = [prefix + tail for tail in tails]
        outputs = self._served.generate(prompts, _greedy(output))
        begun = min(each.metrics.arrival for each in outputs)
        ended = max(each.metrics.last_token or 0.0 for each in outputs)
        return len(tails) * output / (ended - begun)


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def measure(path: Path, threads: int, repeat: int, quick: bool, only: str) -> dict[str, dict[str, float]]:
    peer, ours = PeerProcess(path, threads), Ours(path, threads)
    generator = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [generator.randrange(10, peer.vocab_size - 10) for _ in range(length)]

    cases: dict[str, Callable[[], tuple[float, float]]] = {}

    def case(name: str, make: Callable[[], Pair]) -> None:
        def once() -> tuple[float, float]:
            theirs, mine = make()
            return theirs(), mine()

        cases[name] = once

    def prefill(length: int) -> Callable[[], Pair]:
        def make() -> Pair:
            tokens = prompt(length)
            return lambda: peer.prefill(tokens), lambda: ours.prefill(tokens)

        return make

    def decode_after(batch: int, context: int, steps: int) -> Callable[[], Pair]:
        prompts = [prompt(context) for _ in range(batch)]

        def make() -> Pair:
            peer.hold(prompts[0], batch, steps)
            return lambda: peer.decode_held(steps), lambda: ours.decode_held(prompts, steps)

        return make

    def decode(batch: int, steps: int) -> Callable[[], Pair]:
        def make() -> Pair:
            prompts = [prompt(16) for _ in range(batch)]
            return lambda: peer.decode(prompts, steps), lambda: ours.decode(prompts, steps)

        return make

    num_requests = 16 if quick else 64

    def serve() -> Pair:
        prefix, tails = prompt(512), [prompt(200) for _ in range(num_requests)]
        return lambda: peer.serve(prefix, tails, 64, 16), lambda: ours.serve(prefix, tails, 64)

    case("prefill 512", prefill(512))
    case("prefill 4096", prefill(4096))
    case("decode batch 1", decode(1, 128))
    for batch in (4, 8, 16, 32):
        case(f"decode batch {batch}", decode(batch, 64 if not quick else 24))
    case("decode batch 16 at 512", decode_after(16, 512, 32))
    case(f"{num_requests} requests, shared prefix", serve)

    table = {name: median_of(name, once, repeat) for name, once in cases.items() if only in name}
    peer.close()
    return table


def median_of(name: str, once: Callable[[], tuple[float, float]], repeat: int) -> dict[str, float]:
    pairs = [once() for _ in range(1 if name.endswith("shared prefix") else repeat)]
    theirs, mine = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"{name:28} llama.cpp {theirs:8.1f}  tokenmill {mine:8.1f} tok/s  ratio {mine / theirs:5.2f}",
        file=sys.stderr,
    )
    return {"llama.cpp": theirs, "tokenmill": mine, "ratio": mine / theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+", help="alias or .gguf; several are measured one after the other")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="shorter runs")
    parser.add_argument("--only", default="", help="measurements whose name has this in it, such as 'shared prefix'")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    results = {}
    for model in arguments.model:
        print(f"# {model}", file=sys.stderr)
        results[model] = measure(
            resolve(model).path, arguments.threads, arguments.repeat, arguments.quick, arguments.only
        )
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
