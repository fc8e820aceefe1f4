"""vLLM on the workloads of gpu_workloads.py, through its own `LLM` class: a line of JSON per workload.

    python benchmarks/peers/vllm_bench.py MODEL [--quantization fp8] [--kv-cache-dtype fp8] [--workloads single,...]

MODEL is a folder with a config.json; the weights are random (`load_format="dummy"`). Everything else is vLLM's
default: CUDA graphs and torch.compile on, prefix caching on, 90 % of the GPU's memory. Needs vLLM in this Python (or on
PYTHONPATH) and nothing of tokenmill but the workloads. Started by gpu_vs_vllm.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu_workloads import NAMES, Workloads, report

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a folder: nothing is to be downloaded


class Engine:
    """One vLLM engine and the `generate` that the workloads call."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from vllm import LLM, SamplingParams

        options: dict[str, Any] = {
            "model": str(arguments.model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": arguments.context,
            "max_num_seqs": arguments.concurrency,
            "enable_prefix_caching": True,
            "gpu_memory_utilization": 0.9,
            "kv_cache_dtype": arguments.kv_cache_dtype,
        }
        if arguments.quantization:
            options["quantization"] = arguments.quantization
        self._llm: Any = LLM(**options)
        self._make_params: Any = SamplingParams

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> float:
        params = [
            self._make_params(temperature=0.6, ignore_eos=True, max_tokens=length, detokenize=False)
            for length in lengths
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        generated = [len(output.outputs[0].token_ids) for output in outputs]
        if generated != lengths:
            raise SystemExit("vLLM ended a request early: the figures would not compare")
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="vLLM on the workloads of gpu_workloads.py, random weights.")
    parser.add_argument("model", type=Path, help="folder with a config.json")
    parser.add_argument("--quantization", default="", help="as vLLM's option; empty: what config.json says")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as vLLM's option")
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--workloads", default=",".join(NAMES))
    arguments = parser.parse_args()
    began = time.perf_counter()
    engine = Engine(arguments)
    engine.generate([[1, 2, 3]], [1])
    report("start to first token", seconds=time.perf_counter() - began)
    Workloads(engine.generate).run(arguments.workloads.split(","))


if __name__ == "__main__":
    main()
