"""tokenmill against llama.cpp, and torch for float weights, without a model: random weights of Qwen3-0.6B's layers.

    python benchmarks/cpu_shapes.py [--types Q4_0,Q8_0,Q4_K_M,BF16,F32] [--threads 8,16,1] [--seconds 600] [--out FILE]

For a machine without network: the files (GGUF, 0.47 billion weights, a vocabulary of 32,768 without a meaning) are made
in `--folder`, 4 GB in all; llama-cpp-python needs no installation where PYTHONPATH has its Python files and
LLAMA_CPP_LIB_PATH the folder of libllama. Prefill of 512 tokens, decode at batch 1, and at batch 16 with 512 tokens of
context each (one thread: 32), all engines in turns on the same file, the same threads, medians of `--repeat`. llama.cpp
as peers/llamacpp_peer.py starts it; torch is transformers' model of the same shape in the file's dtype. Our decode
includes greedy sampling, theirs none. A row that took `--row-seconds` is not repeated further (the column `runs`);
rows that no longer fit into `--seconds` are named, not measured. A peer that crashes is named and its column is empty
from there on. `--make`: only write the files.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peers.peer_process import PeerEnded, PeerProcess
from tokenmill import LLM, SamplingParams
from tokenmill.kernels.native import module

FLOATS = ("F32", "BF16")
VOCABULARY = 32768  # of random_gguf.py, which brings torch
Row = tuple[str, Callable[[], dict[str, float]]]
T = TypeVar("T")


class Ours:
    """The peers' measurements on our engine, through the Python API. Pages of prompts are kept, so that sequences with
    a long context begin to decode in the same step; no prompt of `prefill` is ever the same."""

    def __init__(self, path: Path, threads: int) -> None:
        self._llm = LLM(path, device="cpu", threads=threads, context=1024, memory="4GiB", concurrency=16)
        self._prompts: list[list[int]] = []

    def prefill(self, tokens: list[int]) -> float:
        ttft = self._llm.generate([tokens], _greedy(1))[0].metrics.ttft
        assert ttft is not None
        return len(tokens) / ttft

    def hold(self, prompts: list[list[int]]) -> None:
        self._prompts = prompts
        self._llm.generate(prompts, _greedy(1))

    def decode_held(self, steps: int) -> float:
        outputs = self._llm.generate(self._prompts, _greedy(steps + 1))
        firsts = [output.metrics.first_token or 0.0 for output in outputs]
        last = max(output.metrics.last_token or 0.0 for output in outputs)
        return len(outputs) * steps / (last - min(firsts))  # min: a late prompt counts against us

    def close(self) -> None:
        self._llm.close()


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


class Table:
    """Rows as they are measured, the whole written again after each, so that a run cut short keeps what it has."""

    def __init__(self, out: Path | None, seconds: float, planned: list[str]) -> None:
        self._out = out
        self._missing = planned
        self.begun = time.monotonic()
        self.deadline = self.begun + seconds
        self._lines = [
            f"{module().best_isa()}, {os.cpu_count()} processors; tokens per second; "
            "ratio: tokenmill over the best of the others",
            "",
            "| weights | threads | | llama.cpp | torch | tokenmill | ratio | runs |",
            "|---|---|---|---|---|---|---|---|",
        ]
        print("\n".join(self._lines), flush=True)

    def add(self, weights: str, threads: int, name: str, runs: list[dict[str, float]]) -> None:
        speeds = {engine: statistics.median(run[engine] for run in runs) for engine in runs[0]}
        others = [speed for engine, speed in speeds.items() if engine != "tokenmill"]
        ratio = f"{speeds['tokenmill'] / max(others):.2f}" if others else "-"
        cells = [f"{speeds[each]:.1f}" if each in speeds else "-" for each in ("llama.cpp", "torch", "tokenmill")]
        self._lines.append(f"| {weights} | {threads} | {name} | {' | '.join(cells)} | {ratio} | {len(runs)} |")
        self._missing.remove(label(weights, threads, name))
        print(self._lines[-1], flush=True)
        if self._out:
            self._out.write_text("\n".join(self._lines) + f"\n\n{self.closing()}\n")

    def closing(self) -> str:
        left_out = f"Left out for want of time: {'; '.join(self._missing)}." if self._missing else "Nothing left out."
        return f"{left_out} {time.monotonic() - self.begun:.0f} s."


def label(weights: str, threads: int, name: str) -> str:
    return f"{weights} {name}, {threads} threads"


def row_names(weights: str, threads: int) -> list[str]:
    names = ["prefill 512", "decode 1"]
    return names if weights in FLOATS else [*names, f"decode 16 at {512 if threads > 1 else 32}"]


def rows(peers: dict[str, PeerProcess], ours: Ours, weights: str, threads: int, seed: int) -> list[Row]:
    generator = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [generator.randrange(10, VOCABULARY - 10) for _ in range(length)]

    def prefill() -> dict[str, float]:
        tokens = prompt(512)
        return of_each(peers, lambda peer: peer.prefill(tokens)) | {"tokenmill": ours.prefill(tokens)}

    def decode(batch: int, context: int, steps: int) -> Callable[[], dict[str, float]]:
        held = False

        def once() -> dict[str, float]:
            nonlocal held
            if not held:
                prompts, held = [prompt(context) for _ in range(batch)], True
                of_each(peers, lambda peer: peer.hold(prompts[0], batch, steps))
                ours.hold(prompts)
            found = of_each(peers, lambda peer: peer.decode_held(steps))
            return found | {"tokenmill": ours.decode_held(steps)}

        return once

    cases = [prefill, decode(1, 16, 32), decode(16, 512 if threads > 1 else 32, 16)]
    return list(zip(row_names(weights, threads), cases, strict=False))  # no batches with float weights


def of_each(peers: dict[str, PeerProcess], ask: Callable[[PeerProcess], T]) -> dict[str, T]:
    """What each peer answers. One that has ended is named and left out from then on; the others are still measured."""
    found = {}
    for name, peer in list(peers.items()):
        try:
            found[name] = ask(peer)
        except PeerEnded as ended:
            print(f"{name} is left out: {ended}", flush=True)
            del peers[name]
    return found


def start_peers(path: Path, threads: int, torch: bool) -> dict[str, PeerProcess]:
    peers = {}
    for name, module_name in {"llama.cpp": "llamacpp_peer", **({"torch": "torch_peer"} if torch else {})}.items():
        try:
            peers[name] = PeerProcess(path, threads, module_name)
        except PeerEnded as ended:
            print(f"{name} is left out: {ended}", flush=True)
    return peers


def measure(path: Path, weights: str, threads: list[int], table: Table, options: argparse.Namespace) -> None:
    peers: dict[str, PeerProcess] = {}
    for count in threads:
        if time.monotonic() + options.row_seconds > table.deadline:
            break
        if count == threads[0]:
            peers = start_peers(path, count, torch=weights in FLOATS and not options.no_torch)
        of_each(peers, methodcaller("use_threads", count))
        of_each(peers, lambda peer: peer.prefill(list(range(10, 42))))  # warm: pages of the file, clocks
        ours = Ours(path, count)
        ours.prefill(list(range(10, 42)))
        for name, once in rows(peers, ours, weights, count, seed=count):
            begun = time.monotonic()
            if begun + options.row_seconds > table.deadline:
                break
            runs = [once()]
            while len(runs) < options.repeat and time.monotonic() < min(begun + options.row_seconds, table.deadline):
                runs.append(once())
            whole = [run for run in runs if run.keys() == runs[-1].keys()]  # a peer may have ended on the way
            table.add(weights, count, name, whole)
        ours.close()
    of_each(peers, PeerProcess.close)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="Q4_0,Q8_0,Q4_K_M,BF16,F32")
    parser.add_argument("--threads", default="8,16,1", help="in this order, so that what is left out is the last")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--row-seconds", type=float, default=20)
    parser.add_argument("--seconds", type=float, default=900, help="for the whole table")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "tokenmill-shapes")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--make", action="store_true", help="only write the files")
    parser.add_argument("--out", type=Path, help="the table as markdown")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    paths = {weights: options.folder / f"shape-{weights}.gguf" for weights in options.types.split(",")}
    threads = [int(count) for count in options.threads.split(",")]
    # One thread is the slowest and says least about the machine: after everything else, without floats.
    runs = [(weights, threads[:2]) for weights in paths]
    runs += [(weights, threads[2:]) for weights in paths if threads[2:] and weights not in FLOATS]
    for weights, path in paths.items():
        if not path.exists():
            from benchmarks.random_gguf import make_file  # brings torch, which the processes of peers need not import

            begun = time.monotonic()
            make_file(path, weights)
            print(f"{path}: {path.stat().st_size / 1e6:.0f} MB in {time.monotonic() - begun:.1f} s", file=sys.stderr)
    if options.make:
        return
    planned = [label(each, count, name) for each, counts in runs for count in counts for name in row_names(each, count)]
    table = Table(options.out, options.seconds, planned)
    for weights, counts in runs:
        measure(paths[weights], weights, counts, table, options)
    print(f"\n{table.closing()}")


if __name__ == "__main__":
    main()
