"""Decoding at batch 1 as a fraction of what the machine can read: weights x tokens per second over bytes per second.

    python benchmarks/decode_bandwidth.py MODEL [--threads 2] [--tokens 33] [--repeat 3]

Bandwidth and decoding are measured in turns in one process, and medians compared. Bytes are those of the packed weights
that every token reads, without its KV. Not a test.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tokenmill import LLM, SamplingParams
from tokenmill.kernels import cpu
from tokenmill.kernels.cpu import CpuLinear


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="alias, directory or .gguf")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    options = {
        "device": "cpu",
        "context": 512,
        "concurrency": 1,
        "prefix_caching": False,
        "threads": arguments.threads or None,
    }
    with LLM(arguments.model, **options) as llm:
        read = _bytes_per_token(llm)
        generator = random.Random(0)
        bandwidths, speeds = [], []
        for _ in range(arguments.repeat):
            bandwidths.append(cpu.module().read_bandwidth(cpu.pool(), 256 << 20))
            speeds.append(_decode(llm, generator, arguments.tokens))
    bandwidth, speed = statistics.median(bandwidths), statistics.median(speeds)
    reached = speed * read
    print(
        f"{speed:.2f} tok/s x {read / 1e9:.3f} GB = {reached / 1e9:.1f} GB/s; {cpu.num_threads()} threads read "
        f"{bandwidth / 1e9:.1f} GB/s: {reached / bandwidth:.0%}"
    )


def _bytes_per_token(llm: LLM) -> int:
    """What a token reads: every weight, but of an embedding that is no head as well only a row."""
    kernels = {}
    for weight in llm.parts.runtime.model.weights.values():
        if weight.kernel is not None and isinstance(weight.kernel.run, CpuLinear):
            kernels[id(weight.kernel.run)] = weight.kernel.run
    return sum(kernel.nbytes for kernel in kernels.values())


def _decode(llm: LLM, generator: random.Random, tokens: int) -> float:
    prompt = [generator.randrange(10, llm.parts.description.vocab_size - 10) for _ in range(16)]
    output = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))[0]
    assert output.metrics.first_token is not None
    assert output.metrics.last_token is not None
    return (tokens - 1) / (output.metrics.last_token - output.metrics.first_token)


if __name__ == "__main__":
    main()
