"""What `--max-tenant-slowdown` costs and gives: one tenant decodes while another sends prompts.

    python benchmarks/tenant_steps.py [MODEL] [--shape 8b] [--factors 0,6,2] [--device cuda] [--rounds 3]

The engine's own loop, no HTTP. For each factor: the length of the first tenant's steps while the second's prompts are
computed, and the rate at which they are. Medians over rounds, factors in turn. `--shape 8b` makes up weights of
Llama-3.1-8B's shape.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_vs_vllm import write_model
from tokenmill.config import EngineConfig
from tokenmill.engine.build import build_engine
from tokenmill.engine.core import EngineCore
from tokenmill.types import Request, SamplingParams

_numbers = count()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--shape", choices=("8b",))
    parser.add_argument("--factors", default="0,6,2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=8, help="that the first tenant decodes")
    parser.add_argument("--prompts", type=int, default=24, help="of the second tenant")
    parser.add_argument("--prompt-len", type=int, default=1500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_model(Path(folder) / "shape")) if options.shape else options.model
        config = EngineConfig.from_options(
            {"scheduling": "fair", "concurrency": 64, "device": options.device, "prefix_caching": False}
            | ({"load_format": "dummy"} if options.shape else {})
        )
        core = build_engine(model, config).core
        factors = [float(each) for each in options.factors.split(",")]
        found: dict[float, list[tuple[float, float]]] = {factor: [] for factor in factors}
        for number in range(options.rounds + 1):
            for factor in factors:
                row = measure(core, factor, options)
                if number:  # the first round captures graphs and learns what steps cost
                    found[factor].append(row)
    for factor, rows in found.items():
        rate, longest = (statistics.median(column) for column in zip(*rows, strict=True))
        print(json.dumps({"factor": factor, "prompt_tok_s": round(rate), "step_p99_ms": round(longest, 2)}), flush=True)


def measure(core: EngineCore, factor: float, options: argparse.Namespace) -> tuple[float, float]:
    """(prompt tokens per second of the second tenant, 99th percentile of the steps meanwhile in ms)."""
    core.scheduler.discipline.max_slowdown = factor
    for _ in range(options.sequences):
        _add(core, "streams", 32, 100_000)
    for _ in range(60):
        core.step()
    began, steps = time.perf_counter(), []
    names = {_add(core, "prompts", options.prompt_len, 1) for _ in range(options.prompts)}
    while any(core.scheduler.knows(name) for name in names):
        step_began = time.perf_counter()
        core.step()
        steps.append(1e3 * (time.perf_counter() - step_began))
    seconds = time.perf_counter() - began
    for name in list(core.scheduler._siblings):
        core.cancel(name)
    steps.sort()
    return options.prompts * options.prompt_len / seconds, steps[int(0.99 * len(steps))]


def _add(core: EngineCore, tenant: str, prompt_len: int, max_tokens: int) -> str:
    number = next(_numbers)
    prompt = [random.randrange(300, 30_000) for _ in range(prompt_len)]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    core.add(Request(f"{tenant}-{number}", prompt, params, frozenset(), seed=1, arrival=number, tenant=tenant))
    return f"{tenant}-{number}"


if __name__ == "__main__":
    main()
