"""vLLM on the workloads of gpu_workloads.py, through its own `LLM` class: a line of JSON per workload.

    python benchmarks/peers/vllm_bench.py MODEL [--quantization fp8] [--kv-cache-dtype fp8] [--workloads single,...]
                                          [--options JSON] [--steps 256] [--longest 1024] [--prompt 8192]
                                          [--vocabulary 100000] [--spread-routes] [--wait]

MODEL is a folder with a config.json; the weights are random (`load_format="dummy"`). Everything else is vLLM's
default: CUDA graphs and torch.compile on, prefix caching on, 90 % of the GPU's memory. Needs vLLM in this Python (or on
PYTHONPATH) and nothing of tokenmill but the workloads. `--wait`: once all is imported, it waits for a line on stdin.
Started by gpu_vs_vllm.py and gpu_architectures.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu_workloads import NAMES, Workloads, report

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a folder: nothing is to be downloaded
# Of top-k and top-p: rows with seeds of their own, the only ones that ask for these here, do without it anyway, and
# compiling it takes two minutes at the first start on a machine.
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

# So that `spread_routes` may be sent to its worker.
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


def spread_routes(model: Any) -> None:
    """Make routers choose among random experts, as with trained weights and our made-up ones: vLLM's are all within
    0.001 of zero, norms too, so that what comes out of a layer hardly differs from token to token."""
    for name, parameter in model.named_parameters():
        if name.endswith(("embed_tokens.weight", ".embedding.weight")):
            parameter.data.normal_()
        elif "norm" in name and parameter.dim() == 1:
            parameter.data.fill_(1.0)
        elif name.endswith((".gate.weight", ".router.weight")):
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)


def own_parameters(features: dict[str, Any]) -> dict[str, Any]:
    if "structured" not in features:
        return features
    from vllm.sampling_params import StructuredOutputsParams

    kind, text = features["structured"]
    others = {name: value for name, value in features.items() if name != "structured"}
    return others | {"structured_outputs": StructuredOutputsParams(**{{"json_schema": "json"}.get(kind, kind): text})}


class Engine:
    """One vLLM engine and the `generate` that the workloads call."""

    def __init__(self, arguments: argparse.Namespace, began: float) -> None:
        from vllm import LLM, SamplingParams

        self.began = began
        if arguments.wait:
            sys.stdin.readline()
            self.began = time.perf_counter()
        options: dict[str, Any] = {
            "model": str(arguments.model),
            "load_format": "dummy",
            # Needed for grammars only.
            "skip_tokenizer_init": not (arguments.model / "tokenizer.json").exists(),
            "max_model_len": arguments.context,
            "max_num_seqs": arguments.concurrency,
            "enable_prefix_caching": True,
            "gpu_memory_utilization": 0.9,
            "kv_cache_dtype": arguments.kv_cache_dtype,
        }
        if arguments.quantization:
            options["quantization"] = arguments.quantization
        options |= json.loads(arguments.options)
        self._llm: Any = LLM(**options)
        if arguments.spread_routes:
            self._llm.apply_model(spread_routes)
        self._make_params: Any = SamplingParams

    def generate(
        self, prompts: list[list[int]], lengths: list[int], features: Sequence[dict[str, Any]] | None = None
    ) -> float:
        params = [
            self._make_params(temperature=0.6, ignore_eos=True, max_tokens=length, detokenize=False, **more)
            for length, more in zip(lengths, map(own_parameters, features or [{}] * len(lengths)), strict=True)
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
    parser.add_argument("--options", default="{}", help="further arguments of vLLM's LLM class, as JSON")
    parser.add_argument("--workloads", default=",".join(NAMES))
    parser.add_argument("--steps", type=int, default=256, help="decode steps that are timed")
    parser.add_argument("--longest", type=int, default=1024, help="tokens in and out of the mixed workload, at most")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a prompt of the prefill workload")
    parser.add_argument("--vocabulary", type=int, default=100000, help="token ids are below it")
    parser.add_argument("--spread-routes", action="store_true", help="routers that choose among random experts")
    parser.add_argument("--wait", action="store_true", help="once all is imported, wait for a line on stdin")
    arguments = parser.parse_args()
    began = time.perf_counter()
    engine = Engine(arguments, began)
    engine.generate([[1, 2, 3]], [1])
    report("start to first token", seconds=time.perf_counter() - engine.began)
    sizes = {"steps": arguments.steps, "longest": arguments.longest, "prompt": arguments.prompt}
    sizes["vocabulary"] = arguments.vocabulary
    grammars = (arguments.model / "tokenizer.json").exists()
    Workloads(engine.generate, **sizes, continues=arguments.wait, grammars=grammars).run(arguments.workloads.split(","))


if __name__ == "__main__":
    main()
