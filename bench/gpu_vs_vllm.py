"""Our engine on one GPU, and vLLM where it is installed, on the same work: Llama-3.1-8B's shape, made-up weights.

    python bench/gpu_vs_vllm.py [--variants bf16,fp8,int4] [--workloads single,decode64,...] [--vllm SCRIPT]

Random prompts, temperature 0.6, no early end, prefix caching on, 256 sequences at most. A line of JSON per workload as
it is measured, a table at the end. `--vllm`: a script that takes MODEL QUANTIZATION KV_DTYPE WORKLOADS and prints such
lines for vLLM; it runs first in each variant, in a process of its own, and the table then has ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenmill import LLM, SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
VARIANTS: dict[str, dict[str, str]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "int4": {"quantization": "int4"},
}
VLLM_ARGUMENTS = {"bf16": ("none", "auto"), "fp8": ("fp8", "fp8"), "int4": ("awq", "auto")}
WORKLOADS = "single,decode8,decode64,decode256,prefill,mixed,shared"
LOWER_IS_BETTER = {"seconds", "ttft_ms", "tpot_ms"}

Row = dict[str, Any]


class Workloads:
    """The same work in the same order as the vLLM script, so that both draw the same prompts."""

    def __init__(self, llm: LLM, show: Callable[..., None]) -> None:
        self._llm, self._show = llm, show
        self._random = random.Random(0)

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(10, 100000) for _ in range(count)]

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> float:
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length) for length in lengths]
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, params)
        took = time.perf_counter() - began
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == sum(lengths)
        return took

    def run(self, which: list[str]) -> None:
        self.generate([self.tokens(64) for _ in range(4)], [16] * 4)
        for name in which:
            if name.startswith("decode"):
                self.decode(int(name.removeprefix("decode")))
            else:
                getattr(self, name)()

    def single(self) -> None:
        self.generate([self.tokens(512)], [8])
        first = self.generate([self.tokens(512)], [1])
        whole = self.generate([self.tokens(512)], [257])
        self._show("single", ttft_ms=first * 1e3, tpot_ms=(whole - first) / 256 * 1e3)

    def decode(self, batch: int) -> None:
        prompts = [self.tokens(512) for _ in range(batch)]
        self.generate(prompts, [1] * batch)  # fills the prefix cache, so that only decoding differs below
        self.generate(prompts, [8] * batch)  # and the graph of this size is captured
        whole = self.generate(prompts, [257] * batch)
        first = self.generate(prompts, [1] * batch)
        self._show(f"decode{batch}", tpot_ms=(whole - first) / 256 * 1e3, tok_s=batch * 256 / (whole - first))

    def prefill(self) -> None:
        for _ in range(2):
            took = self.generate([self.tokens(8192) for _ in range(8)], [1] * 8)
        self._show("prefill8x8192", tok_s=8 * 8192 / took)

    def mixed(self) -> None:
        prompts = [self.tokens(self._random.randint(100, 1024)) for _ in range(256)]
        lengths = [self._random.randint(100, 1024) for _ in range(256)]
        took = self.generate(prompts, lengths)
        self._show("mixed256", out_tok_s=sum(lengths) / took)

    def shared(self) -> None:
        prefix = self.tokens(4096)
        took = self.generate([prefix + self.tokens(128) for _ in range(256)], [64] * 256)
        self._show("shared4096x256", req_s=256 / took)


def measure(variant: str, model: Path, which: list[str], rows: list[Row]) -> None:
    def show(workload: str, **values: float) -> None:
        for figure, value in values.items():
            rows.append({"engine": "tokenmill", "variant": variant, "workload": workload, figure: round(value, 3)})
            print(json.dumps(rows[-1]), flush=True)

    began = time.perf_counter()
    options: dict[str, Any] = {"load_format": "dummy", "device": "cuda", "context": 16384, "concurrency": 256}
    with LLM(model, **options, **VARIANTS[variant]) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True))
        show("start to first token", seconds=time.perf_counter() - began)
        Workloads(llm, show).run(which)
        executor: Any = llm.parts.runtime.executor
        show("queued steps dropped", count=float(getattr(executor, "num_dropped", 0)))


def measure_vllm(script: Path, variant: str, model: Path, which: list[str], rows: list[Row]) -> None:
    command = [sys.executable, str(script), str(model), *VLLM_ARGUMENTS[variant], ",".join(which)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            workload = {"startup": "start to first token"}.get(row["workload"], row["workload"])
            figures = {key: value for key, value in row.items() if key != "workload"}
            rows += [{"engine": "vllm", "variant": variant, "workload": workload, k: v} for k, v in figures.items()]
    if done.returncode:
        print(f"vLLM ended with status {done.returncode}: {done.stderr[-500:]}", file=sys.stderr)


def table(rows: list[Row]) -> str:
    """Workload and figure by variant; a ratio behind it where vLLM did the same."""
    found: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for row in rows:
        figure = next(key for key in row if key not in ("engine", "variant", "workload"))
        found.setdefault((row["workload"], figure), {}).setdefault(row["variant"], {})[row["engine"]] = row[figure]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    lines = ["| workload | figure | " + " | ".join(variants) + " |", "|---|---|" + "---|" * len(variants)]
    for (workload, figure), by_variant in found.items():
        cells = []
        for variant in variants:
            ours, theirs = (by_variant.get(variant, {}).get(name) for name in ("tokenmill", "vllm"))
            cell = "" if ours is None else f"{ours:g}"
            if ours and theirs:
                cell += f" ({theirs / ours if figure in LOWER_IS_BETTER else ours / theirs:.2f}x)"
            cells.append(cell)
        lines.append(f"| {workload} | {figure} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", default="bf16,fp8,int4")
    parser.add_argument("--workloads", default=WORKLOADS)
    parser.add_argument("--vllm", type=Path, help="script that runs vLLM on the same workloads")
    arguments = parser.parse_args()
    which = arguments.workloads.split(",")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(CONFIG))
        for variant in arguments.variants.split(","):
            if arguments.vllm is not None:
                measure_vllm(arguments.vllm, variant, model, which, rows)
            measure(variant, model, which, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
