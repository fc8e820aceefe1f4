"""What ranks cost on one host: the time of an exchange by size, and what a model does with and without them.

    python -m benchmarks.ranks --model smollm2 --ranks 2

Prints one JSON object. Exchanges: a gather as ranks make it in shared memory and one by gloo, p50 in microseconds, with
the line t = start + bytes / bandwidth that fits them (least squares of relative errors) and what the planner's formula
says. Decoding: requests of 32 tokens each, greedy, tokens per second. Prompts: seconds of one long prompt.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tokenmill.engine import lanes as lane_core
from tokenmill.engine.llm import LLM
from tokenmill.hardware.sharding import Grid
from tokenmill.plan.cost.communication import host_exchange_ms
from tokenmill.runtime.ranks.gloo import GlooGroup
from tokenmill.runtime.ranks.groups import make_group, shared_memory
from tokenmill.runtime.ranks.runner import RankedRunner
from tokenmill.types import SamplingParams

_WIDTHS = (576, 4096, 32768, 131072, 1 << 20)  # numbers that all ranks have together
_REPEATS = 200


def _exchange(rank: int, ranks: int, meeting: str, memory: str, results: Any) -> None:
    torch.set_num_threads(1)
    group = make_group(Grid(ranks).place(rank), meeting, 60.0, "cpu", memory)
    found = {}
    for width in _WIDTHS:
        x, times = torch.zeros(1, width // ranks), []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            group.gather(x)
            times.append((time.perf_counter() - began) * 1e6)
        found[4 * width] = float(np.median(times))
    if rank == 0:
        results.put(found)


def exchanges(ranks: int, shared: bool) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    meeting = os.path.join(tempfile.mkdtemp(), "meeting")
    memory = shared_memory(Grid(ranks), "cpu") if shared else ""
    processes = [
        context.Process(target=_exchange, args=(rank, ranks, meeting, memory, results)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found: dict[int, float] = results.get(timeout=120)
    for process in processes:
        process.join()
    if memory:
        os.unlink(memory)
    return {"p50_us": {nbytes: round(each) for nbytes, each in found.items()}, **fit(found, ranks)}


def fit(found: dict[int, float], ranks: int) -> dict[str, float]:
    """The start in microseconds and the gigabytes per second that a rank receives."""
    received = np.array([(ranks - 1) / ranks * nbytes for nbytes in found])
    times = np.array(list(found.values()))
    matrix = np.stack((np.ones_like(times), received), 1) / times[:, None]
    (start, each), *_ = np.linalg.lstsq(matrix, np.ones_like(times), rcond=None)
    return {"start_us": round(float(start), 1), "gb_s": round(1e-3 / float(each), 2)}


def decoding(model: str, sequences: int = 4, **options: Any) -> float:
    """Tokens per second."""
    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    prompts = [[5 + number, 17, 29, 41] for number in range(sequences)]
    with LLM(model, context=256, concurrency=sequences, **options) as llm:
        llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
        began = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - began
    return round(sum(len(output.outputs[0].token_ids) for output in outputs) / seconds, 1)


def prompt_seconds(model: str, length: int, **options: Any) -> float:
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    with LLM(model, context=length + 8, concurrency=1, prefix_caching=False, **options) as llm:
        llm.generate([list(range(5, 40))], params)
        began = time.perf_counter()
        llm.generate([[5 + number % 200 for number in range(length)]], params)
        return round(time.perf_counter() - began, 2)


def lanes(model: str, sequences: int) -> dict[str, Any]:
    """Two stages: one step at a time, and a step of half of the sequences in each. `waiting`: the share of its time in
    which the first stage waits for the last one."""
    found: dict[str, Any] = {}
    receive, waited = GlooGroup.receive, [0.0]

    def timed(group: GlooGroup, shape: Sequence[int], rank: int, number: int) -> torch.Tensor:
        began = time.perf_counter()
        x = receive(group, shape, rank, number)
        waited[0] += time.perf_counter() - began
        return x

    GlooGroup.receive = timed  # type: ignore[method-assign]
    lane_core.MIN_SEQUENCES = 1
    for name, count in (("one step at a time", 1), ("two lanes", 2)):
        RankedRunner.lanes = count  # type: ignore[assignment,method-assign]
        waited[0] = 0.0
        rate = decoding(model, sequences, pipeline_parallel_size=2, rank_timeout=60.0)
        seconds = sequences * 32 / rate
        found[name] = {"tokens_per_second": rate, "waiting": round(waited[0] / seconds, 2)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="stories15m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--part", choices=("exchanges", "decoding", "prompts", "lanes"), action="append")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64, 128], help="of the lanes")
    chosen = parser.parse_args()
    parts = chosen.part or ["exchanges", "decoding", "prompts", "lanes"]
    ranks = {"tensor_parallel_size": chosen.ranks, "rank_timeout": 60.0}
    report: dict[str, Any] = {"model": chosen.model, "ranks": chosen.ranks}
    if "exchanges" in parts:
        report["shared memory"] = exchanges(chosen.ranks, True)
        report["gloo"] = exchanges(chosen.ranks, False)
        report["formula_us"] = {4 * each: round(1e3 * host_exchange_ms(4 * each, chosen.ranks)) for each in _WIDTHS}
    if "decoding" in parts:
        report["tokens per second"] = {
            "one process": decoding(chosen.model),
            "one process, eager": decoding(chosen.model, executor="eager"),
            "one process, one thread": decoding(chosen.model, threads=1),
            "ranks, recorded": decoding(chosen.model, **ranks),
            "ranks, eager": decoding(chosen.model, **ranks, executor="eager"),
            "ranks, exact": decoding(chosen.model, **ranks, exact_ranks=True),
        }
    if "prompts" in parts:
        report[f"seconds of {chosen.prompt} tokens"] = {
            "one process, eager, one thread": prompt_seconds(chosen.model, chosen.prompt, executor="eager", threads=1),
            "one process, eager": prompt_seconds(chosen.model, chosen.prompt, executor="eager"),
            "context parallel": prompt_seconds(
                chosen.model, chosen.prompt, context_parallel_size=chosen.ranks, rank_timeout=60.0
            ),
        }
    if "lanes" in parts:
        report["two stages"] = {f"{each} sequences": lanes(chosen.model, each) for each in chosen.sequences}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
