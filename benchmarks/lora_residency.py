"""Many adapters on one base: throughput while most of them are on disk.

Registers --adapters random adapters of --rank, of which --in-memory lie on the device and as many in host memory; the
others are read from disk when a request names them. Requests choose adapters by Zipf's law, the most popular one about
every sixth time. Prints tokens per second of each window of the run, so that one sees whether it is steady, beside the
same requests on the base alone and with one adapter for all; and how often adapters were brought, read and evicted.

    python benchmarks/lora_residency.py stories15m
    python benchmarks/lora_residency.py smollm2 --adapters 200 --in-memory 32 --windows 8 --requests 64
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import mean, pstdev

import torch

from tokenmill.bench.prompts import random_requests
from tokenmill.checkpoint.adapters.adapter import Adapter, AdapterMatrix
from tokenmill.checkpoint.adapters.fit import module_shapes
from tokenmill.checkpoint.adapters.write import write_adapter
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.sources import resolve
from tokenmill.engine.llm import LLM
from tokenmill.types import SamplingParams

_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_adapters(model: Path, folder: Path, count: int, rank: int) -> dict[str, Path]:
    shapes = {
        name: shape
        for name, shape in module_shapes(open_checkpoint(model).description).items()
        if name.rpartition(".")[2] in _TARGETS
    }
    paths = {}
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        matrices = {
            name: AdapterMatrix(
                name,
                torch.randn(rank, inputs, generator=generator) / inputs**0.5,
                torch.randn(outputs, rank, generator=generator) * 0.01,
                1.0,
            )
            for name, (outputs, inputs) in shapes.items()
        }
        path = paths[f"adapter-{number}"] = folder / f"adapter-{number}"
        write_adapter(Adapter(path.name, matrices), path, dtype=torch.bfloat16)
    return paths


class Run:
    """Windows of requests through one engine."""

    def __init__(self, llm: LLM, options: argparse.Namespace) -> None:
        self.llm, self.options, self.seed = llm, options, 0

    def window(self, loras: list[str | None]) -> float:
        """Output tokens per second."""
        self.seed += 1
        sizes = self.options.input_len, self.options.output_len
        requests = random_requests(self.llm.parts.description.vocab_size, len(loras), *sizes, seed=self.seed)
        params = SamplingParams(max_tokens=self.options.output_len, temperature=0.0, ignore_eos=True)
        began = time.perf_counter()
        self.llm.generate([each.prompt_ids for each in requests], params, lora=loras)
        return len(loras) * self.options.output_len / (time.perf_counter() - began)

    def steady(self, draw: torch.Generator | None, names: list[str | None], shown: bool = False) -> list[float]:
        rates = []
        weights = torch.tensor([1.0 / (place + 1) for place in range(len(names))])
        stats = self.llm.stats
        for number in range(self.options.windows):
            loads, reads = stats.num_adapter_loads, stats.num_adapter_reads
            chosen = torch.multinomial(weights, self.options.requests, replacement=True, generator=draw).tolist()
            rates.append(self.window([names[each] for each in chosen]))
            if shown:
                brought, read = stats.num_adapter_loads - loads, stats.num_adapter_reads - reads
                distinct = len(set(chosen))
                print(
                    f"window {number + 1}: {rates[-1]:8.1f} tokens/s, {distinct} adapters asked for, {brought} brought "
                    f"to the device, {read} of them read from disk",
                    flush=True,
                )
        return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="stories15m")
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--in-memory", type=int, default=32)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--requests", type=int, default=64, help="of each window")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=16)
    options = parser.parse_args()
    path = resolve(options.model).path
    with tempfile.TemporaryDirectory(prefix="tokenmill-adapters-") as folder:
        paths = write_adapters(path, Path(folder), options.adapters, options.rank)
        began = time.perf_counter()
        limits = {"max_loras": options.in_memory, "max_cpu_loras": options.in_memory}
        context = options.input_len + options.output_len + 16
        with LLM(path, loras=paths, context=context, concurrency=options.concurrency, **limits) as llm:
            bank = llm.parts.runtime.executor.adapters
            assert bank is not None
            print(
                f"{len(llm.loras)} adapters of rank {options.rank} registered in {time.perf_counter() - began:.1f} s; "
                f"{bank.num_slots} slots on the device ({llm.parts.runtime.executor.name})"
            )
            run = Run(llm, options)
            draw = torch.Generator().manual_seed(0)
            run.window([None] * options.requests)  # warm
            base = run.steady(draw, [None])
            one = run.steady(draw, ["adapter-0"])
            many = run.steady(draw, list(paths), shown=True)
            later = many[len(many) // 2 :]
            host = llm.parts.adapters.store
            print(
                f"steady: {mean(later):.1f} tokens/s (spread {pstdev(later) / mean(later):.1%}), "
                f"{mean(later) / mean(base):.2f} of the base alone ({mean(base):.1f}), "
                f"{mean(later) / mean(one):.2f} of one adapter for all ({mean(one):.1f})"
            )
            print(
                f"in memory: {llm.stats.num_adapters_on_device} on the device ({bank.nbytes / 2**20:.1f} MiB), "
                f"{len(host)} on the host ({host.nbytes / 2**20:.1f} MiB); {llm.stats.num_adapter_evictions} evictions"
            )


if __name__ == "__main__":
    main()
