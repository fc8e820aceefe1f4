"""Our engine on one GPU, and vLLM where it is installed, on the same work: Llama-3.1-8B's shape, made-up weights.

    python benchmarks/gpu_vs_vllm.py [--variants bf16,fp8,int4] [--workloads single,decode64,...] [--out FILE]
                                [--vllm SCRIPT [--vllm-packages FOLDER]]

Random prompts, temperature 0.6, no early end, prefix caching on, 256 sequences at most. A line of JSON per workload as
it is measured (also appended to `--out`), a table at the end. `--vllm`: a script that takes MODEL QUANTIZATION KV_DTYPE
WORKLOADS and prints such lines for vLLM; the table then has ratios. Each engine and variant has a process of its own,
vLLM first. Ours answers a request first ("start to first token") and then prepares all kinds of steps ("warm up"), as a
server does when idle; vLLM does so before it is ready.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
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
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "int4": {"quantization": "int4"},
}
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cuda",
    "context": 16384,
    "concurrency": 256,
    "batch_tokens": 16384,  # what vLLM takes by itself offline, on a GPU of this size
}
VLLM_ARGUMENTS = {"bf16": ("none", "auto"), "fp8": ("fp8", "fp8"), "int4": ("none", "auto")}
VLLM_INT4 = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
WORKLOADS = "single,decode8,decode64,decode256,prefill,mixed,shared"
HEAVY = ("prefill", "decode256", "mixed")  # those in which the tensor cores' power is felt
LOWER_IS_BETTER = {"seconds", "ttft_ms", "tpot_ms"}

Row = dict[str, Any]


class Workloads:
    """The same work in the same order as the vLLM script, so that both draw the same prompts."""

    def __init__(self, llm: LLM, show: Callable[..., None]) -> None:
        self._llm, self._report = llm, show
        self._random = random.Random(0)
        self.remark = ""

    def _show(self, workload: str, **values: float) -> None:
        self._report(workload + self.remark, **values)

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


def measure(variant: str, model: Path, which: list[str]) -> None:
    """Our engine, in this process: a line of JSON per figure."""

    def show(workload: str, **values: float) -> None:
        print(
            json.dumps({"workload": workload} | {name: round(value, 3) for name, value in values.items()}), flush=True
        )

    began = time.perf_counter()
    with LLM(model, **OPTIONS, **VARIANTS[variant]) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True))
        show("start to first token", seconds=time.perf_counter() - began)
        began = time.perf_counter()
        llm.warm_up()
        show("warm up", seconds=time.perf_counter() - began)
        gc.freeze()  # as the engine process of a server does: no pauses for what lives as long as the engine
        workloads = Workloads(llm, show)
        workloads.run(which)
        if variant == "int4":
            make_codes_alike(llm)
            workloads.remark = ", codes alike"
            workloads.run([name for name in HEAVY if name in which])
        executor: Any = llm.parts.runtime.executor
        show("queued steps dropped", count=float(getattr(executor, "num_dropped", 0)))


def make_codes_alike(llm: LLM) -> None:
    """All 4-bit codes one value, as vLLM's made-up weights have it (it draws floats only): the tensor cores need less
    power for such and run faster."""
    for weight in llm.parts.runtime.model.weights.values():
        kernel: Any = None if weight.kernel is None else weight.kernel.run
        codes = getattr(getattr(getattr(kernel, "whole", kernel), "weight", None), "codes", None)
        if codes is not None:
            codes.fill_(0x77777777)


def collect(engine: str, variant: str, command: list[str], packages: Path | None, keep: Callable[[Row], None]) -> None:
    """Run one engine and keep its figures as they come."""
    paths = [str(packages)] if packages is not None else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"workload"'):
                found = json.loads(line)
                workload = found.pop("workload")
                workload = "start to first token" if workload == "startup" else workload
                for figure, value in found.items():
                    keep({"engine": engine, "variant": variant, "workload": workload, figure: value})
    if process.returncode:
        print(f"{engine} ended with status {process.returncode}", file=sys.stderr)


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


def write_model(folder: Path, **additions: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | additions))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", default="bf16,fp8,int4")
    parser.add_argument("--workloads", default=WORKLOADS)
    parser.add_argument("--out", type=Path, help="file that figures are appended to as they are measured")
    parser.add_argument("--vllm", type=Path, help="script that runs vLLM on the same workloads")
    parser.add_argument("--vllm-packages", type=Path, help="folder with vLLM and what it needs")
    parser.add_argument(
        "--alone", type=Path, metavar="MODEL", help="only our engine, in this process: MODEL is its folder"
    )
    arguments = parser.parse_args()
    if arguments.alone is not None:
        measure(arguments.variants, arguments.alone, arguments.workloads.split(","))
        return
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.out is not None:
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        plain = write_model(Path(folder) / "plain")
        awq = write_model(Path(folder) / "awq", quantization_config=VLLM_INT4)
        for variant in arguments.variants.split(","):
            if arguments.vllm is not None:
                model = awq if variant == "int4" else plain
                own = [str(arguments.vllm), str(model), *VLLM_ARGUMENTS[variant], arguments.workloads]
                collect("vllm", variant, [sys.executable, *own], arguments.vllm_packages, keep)
            own = [__file__, "--variants", variant, "--workloads", arguments.workloads, "--alone", str(plain)]
            collect("tokenmill", variant, [sys.executable, *own], None, keep)
    print(table(rows))


if __name__ == "__main__":
    main()
