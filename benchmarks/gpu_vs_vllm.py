"""tokenmill on one GPU, and vLLM where it is installed, on the same work: one model's shape, random weights.

    python benchmarks/gpu_vs_vllm.py [--config FILE] [--variants bf16,fp8,int4,w4a8] [--workloads single,decode64,...]
                                     [--steps 256] [--out FILE] [--vllm] [--vllm-python PYTHON] [--vllm-packages FOLDER]

The shape is that of any config.json (default: Llama-3.1-8B's; `int4` is groups of 128 without zero points, for vLLM a
GPTQ file of the same; `w4a8` the same groups with inputs rounded to float8 per token, one compressed-tensors config for
both engines), the workloads are those of gpu_workloads.py. A line of JSON per workload as it is measured (also appended
to `--out`), a table at the end. `--vllm` runs peers/vllm_bench.py before each variant; the table then has ratios. Each
engine and variant has a process of its own, which imports its packages while the one before is measured
and touches the GPU only when that one has ended. With the workload `features` there is a made-up tokenizer, for its
grammars (vLLM: its default backend); only ours then makes text of what comes out. Ours answers a request first ("start
to first token") and then captures all kinds of steps ("warm up"), as a server does when idle; vLLM captures before it
is ready.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_workloads import NAMES, Workloads, report
from benchmarks.made_up_tokenizer import write_tokenizer
from tokenmill import LLM, SamplingParams
from tokenmill.types import StructuredSpec

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
    "w4a8": {},  # as its config says
}
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cuda",
    "context": 16384,
    "concurrency": 256,
    "batch_tokens": 16384,  # vLLM's offline default on a GPU of this size
}
VLLM_SCRIPT = Path(__file__).parent / "peers" / "vllm_bench.py"
VLLM_OPTIONS = {"bf16": [], "fp8": ["--quantization", "fp8", "--kv-cache-dtype", "fp8"], "int4": [], "w4a8": []}
# Symmetric groups, as ours: vLLM has its fastest 4-bit kernels for such files.
# Which linears are quantized it reads from the tensors of a file, or here: without either it computes in 16 bits.
VLLM_INT4 = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": False,
    "modules_in_block_to_quantize": [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ],
}


def packed_config(group: int) -> dict[str, Any]:
    """W4A8 of compressed-tensors: 4-bit integers in symmetric groups, inputs rounded to float8 with a scale per token.
    vLLM has one kernel for it, for Hopper, and that one wants groups of 128."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": True}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    scheme = {"targets": ["Linear"], "weights": weights | {"dynamic": False}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme | {"output_activations": None}},
        "ignore": ["lm_head"],
    }


HEAVY = ("prefill", "decode256", "mixed")  # workloads whose speed depends on how much power the tensor cores draw
LOWER_IS_BETTER = {"seconds", "ttft_ms", "tpot_ms"}

Row = dict[str, Any]


def measure(variant: str, model: Path, names: list[str], sizes: dict[str, int]) -> None:
    """Our engine, in this process: a line of JSON per workload."""
    began = time.perf_counter()
    with LLM(model, **OPTIONS, **VARIANTS[variant]) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True))
        report("start to first token", seconds=time.perf_counter() - began)
        began = time.perf_counter()
        llm.warm_up()
        report("warm up", seconds=time.perf_counter() - began)
        gc.freeze()  # as the engine process of a server does: no pauses for objects that live as long as the engine

        def generate(
            prompts: list[list[int]], lengths: list[int], features: Sequence[dict[str, Any]] | None = None
        ) -> float:
            rows = zip(lengths, map(own_parameters, features or [{}] * len(lengths)), strict=True)
            params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n, **more) for n, more in rows]
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds = time.perf_counter() - start
            assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
            return seconds

        workloads = Workloads(generate, **sizes, grammars=(model / "tokenizer.json").exists())
        workloads.run(names)
        if variant in ("int4", "w4a8"):
            make_codes_alike(llm)
            workloads.suffix = ", codes alike"
            workloads.run([name for name in HEAVY if name in names])
        executor: Any = llm.parts.runtime.executor
        report("queued steps dropped", count=float(getattr(executor, "num_dropped", 0)))


def own_parameters(features: dict[str, Any]) -> dict[str, Any]:
    if "structured" not in features:
        return features
    return features | {"structured": StructuredSpec(*features["structured"])}


def make_codes_alike(llm: LLM) -> None:
    """Set all 4-bit codes to one value, as vLLM's random weights are (it draws floats only): tensor cores need less
    power for equal operands and clock higher."""
    for weight in llm.parts.runtime.model.weights.values():
        kernel: Any = None if weight.kernel is None else weight.kernel.run
        codes = getattr(getattr(getattr(kernel, "whole", kernel), "weight", None), "codes", None)
        if codes is not None:
            codes.fill_(0x77777777)


@dataclass(frozen=True, slots=True)
class Job:
    """One engine on one variant, in a process that waits for a line on stdin once all is imported."""

    engine: str
    variant: str
    command: list[str]
    packages: Path | None = None

    def start(self) -> subprocess.Popen[str]:
        paths = [str(self.packages)] if self.packages is not None else []
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen([*self.command, "--wait"], text=True, env=environment, **pipes)


def collect(jobs: list[Job], keep: Callable[[Row], None]) -> None:
    """Run them one after the other and keep their figures as they come."""
    process = jobs[0].start()
    for job, following in zip(jobs, [*jobs[1:], None], strict=True):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        waiting = None if following is None else following.start()
        for line in process.stdout:
            if line.startswith('{"workload"'):
                row = json.loads(line)
                if "error" in row:
                    print(f"{job.engine}: {row}", file=sys.stderr)
                    continue
                workload = row.pop("workload")
                for figure, value in row.items():
                    keep({"engine": job.engine, "variant": job.variant, "workload": workload, figure: value})
        if process.wait():
            print(f"{job.engine} ended with status {process.returncode}", file=sys.stderr)
        if waiting is not None:
            process = waiting


def table(rows: list[Row]) -> str:
    """Workload and figure by variant; a ratio behind it where vLLM did the same."""
    figures: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for row in rows:
        figure = next(key for key in row if key not in ("engine", "variant", "workload"))
        figures.setdefault((row["workload"], figure), {}).setdefault(row["variant"], {})[row["engine"]] = row[figure]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    lines = ["| workload | figure | " + " | ".join(variants) + " |", "|---|---|" + "---|" * len(variants)]
    for (workload, figure), by_variant in figures.items():
        cells = []
        for variant in variants:
            ours, theirs = (by_variant.get(variant, {}).get(name) for name in ("tokenmill", "vllm"))
            cell = "" if ours is None else f"{ours:g}"
            if ours and theirs:
                cell += f" ({theirs / ours if figure in LOWER_IS_BETTER else ours / theirs:.2f}x)"
            cells.append(cell)
        lines.append(f"| {workload} | {figure} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_model(folder: Path, config: dict[str, Any] = CONFIG, **additions: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | additions))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, help="config.json of the shape (default: Llama-3.1-8B's)")
    parser.add_argument("--variants", default="bf16,fp8,int4")
    parser.add_argument("--workloads", default=",".join(NAMES))
    parser.add_argument("--steps", type=int, default=256, help="decode steps that are timed")
    parser.add_argument("--out", type=Path, help="file that figures are appended to as they are measured")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM too, by peers/vllm_bench.py")
    parser.add_argument("--vllm-python", default=sys.executable, help="the Python that has vLLM (default: this one)")
    parser.add_argument("--vllm-packages", type=Path, help="folder with vLLM, put on its PYTHONPATH")
    parser.add_argument("--alone", type=Path, metavar="MODEL", help="only our engine, in this process, on this folder")
    parser.add_argument("--wait", action="store_true", help="with --alone: once all is imported, wait for a line")
    arguments = parser.parse_args()
    config = CONFIG if arguments.config is None else json.loads(arguments.config.read_text())
    sizes = {"steps": arguments.steps, "vocabulary": min(100000, config["vocab_size"])}
    if arguments.alone is not None:
        if arguments.wait:
            sys.stdin.readline()
        measure(arguments.variants, arguments.alone, arguments.workloads.split(","), sizes)
        return
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.out is not None:
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        plain = write_model(Path(folder) / "plain", config)
        int4 = write_model(Path(folder) / "int4", config, quantization_config=VLLM_INT4)
        w4a8 = write_model(Path(folder) / "w4a8", config, quantization_config=packed_config(128))
        if "features" in arguments.workloads.split(","):  # some of which are grammars
            for model in (plain, int4, w4a8):
                write_tokenizer(model, config)
        more = ["--workloads", arguments.workloads, "--steps", str(arguments.steps)]
        jobs = []
        for variant in arguments.variants.split(","):
            if arguments.vllm:
                model = {"int4": int4, "w4a8": w4a8}.get(variant, plain)
                vocabulary = ["--vocabulary", str(sizes["vocabulary"])]
                peer = [str(VLLM_SCRIPT), str(model), *VLLM_OPTIONS[variant], *more, *vocabulary]
                jobs.append(Job("vllm", variant, [arguments.vllm_python, *peer], arguments.vllm_packages))
            shape = [] if arguments.config is None else ["--config", str(arguments.config)]
            own = w4a8 if variant == "w4a8" else plain
            command = [sys.executable, __file__, *shape, "--variants", variant, *more, "--alone", str(own)]
            jobs.append(Job("tokenmill", variant, command))
        collect(jobs, keep)
    print(table(rows))


if __name__ == "__main__":
    main()
