"""What vLLM's own adapters cost: decode steps with a different adapter for every few rows against steps without.

    python benchmarks/peers/vllm_lora.py MODEL ADAPTER BATCH ADAPTERS RANK STEPS [--rounds 3]

MODEL is a folder with a config.json (random weights), ADAPTER one PEFT folder, loaded ADAPTERS times under names of its
own: each has a slot and memory of its own, as in lora.py. A step's time is that of a whole run less that of one token,
by the number of steps. Everything else is vLLM's default. Prints one line of JSON; started by lora.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a folder: nothing is to be downloaded
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # see vllm_bench.py

PROMPT = 32


class Decoding:
    def __init__(self, arguments: argparse.Namespace) -> None:
        from vllm import LLM, SamplingParams
        from vllm.lora.request import LoRARequest

        self._llm: Any = LLM(
            model=arguments.model,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=max(32, arguments.batch),
            enable_prefix_caching=False,
            enable_lora=True,
            max_loras=arguments.adapters,
            max_lora_rank=arguments.rank,
        )
        self._params: Any = SamplingParams
        self.adapters = [
            LoRARequest(f"adapter{number}", number, arguments.adapter) for number in range(1, arguments.adapters + 1)
        ]
        self._steps = arguments.steps
        self._random = random.Random(0)

    def _run(self, adapters: list[Any], length: int) -> float:
        prompts = [{"prompt_token_ids": [self._random.randrange(10, 30000) for _ in range(PROMPT)]} for _ in adapters]
        params = self._params(temperature=0.0, ignore_eos=True, max_tokens=length, detokenize=False)
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)
        seconds = time.perf_counter() - began
        if any(len(output.outputs[0].token_ids) != length for output in outputs):
            raise SystemExit("vLLM ended a request early: the figures would not compare")
        return seconds

    def seconds(self, adapters: list[Any]) -> float:
        """Of one decode step, with these adapters for the rows (None: the base)."""
        first = self._run(adapters, 1)
        return (self._run(adapters, self._steps + 1) - first) / self._steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("adapter")
    for name in ("batch", "adapters", "rank", "steps"):
        parser.add_argument(name, type=int)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    decoding = Decoding(arguments)
    plain = [None] * arguments.batch
    mixed = [decoding.adapters[row % arguments.adapters] for row in range(arguments.batch)]
    one = [decoding.adapters[0]] * arguments.batch
    times: dict[str, list[float]] = {"without": [], "mixed": [], "one": []}
    for number in range(arguments.rounds + 1):
        for name, adapters in (("without", plain), ("mixed", mixed), ("one", one)):
            seconds = decoding.seconds(adapters)
            if number:  # the first round loads the adapters and compiles
                times[name].append(seconds)
    ratios = [with_them / without for with_them, without in zip(times["mixed"], times["without"], strict=True)]
    figures = {
        "engine": "vllm",
        "without_ms": 1e3 * statistics.median(times["without"]),
        "with_ms": 1e3 * statistics.median(times["mixed"]),
        "one_adapter_ms": 1e3 * statistics.median(times["one"]),
        "ratio": statistics.median(ratios),
        "best_ratio": min(times["mixed"]) / min(times["without"]),
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
