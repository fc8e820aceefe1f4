"""What adapters cost: decoding with a different one for every few rows against decoding without, in turns in one run.

    python benchmarks/lora.py [MODEL] [--device cpu] [--threads 2] [--batch 16] [--adapters 8] [--rank 16] [--rounds 9]
                              [--steps 32] [--vllm] [--vllm-python PYTHON] [--vllm-packages FOLDER] [--out FILE]

Random adapters of all seven matrices of a layer. Steps go through scheduler and runner, without text. Prints both times
of a step, their ratio, and the floor: the bytes of the adapters beside those of the base. With `--device cuda` and no
MODEL it is Llama-3.1-8B's shape with random weights; `--vllm` then measures vLLM's own adapters, in a process of its
own, on the same shape before ours.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.gpu_vs_vllm import write_model
from tokenmill.checkpoint.adapters.adapter import Adapter, AdapterMatrix
from tokenmill.checkpoint.adapters.fit import module_shapes
from tokenmill.checkpoint.adapters.write import write_adapter
from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.open import open_source
from tokenmill.config import EngineConfig
from tokenmill.engine.build import EngineParts, build_engine
from tokenmill.engine.core import EngineCore
from tokenmill.runtime.runner import ModelRunner
from tokenmill.types import Request, SamplingParams, StepPlan, StepResult

VLLM_SCRIPT = Path(__file__).parent / "peers" / "vllm_lora.py"
PROMPT = 32  # tokens in: what is measured is decoding


def make_adapter(description: ModelDescription, rank: int, seed: int) -> Adapter:
    """Every projection of every layer, with values as a trained adapter has them."""
    generator = torch.Generator().manual_seed(seed)
    matrices = {}
    for name, (rows, columns) in module_shapes(description).items():
        if name.endswith("_proj"):
            a = torch.randn(rank, columns, generator=generator) * columns**-0.5
            matrices[name] = AdapterMatrix(name, a, torch.randn(rows, rank, generator=generator) * 0.02, 2.0)
    return Adapter(f"adapter{seed}", matrices)


class MixedRunner:
    """Gives every row the slot of its request."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.slots: dict[str, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for row in plan.scheduled:
            row.adapter_slot = self.slots[row.request.request_id]
        return self._runner.execute(plan)


class Decoding:
    def __init__(self, parts: EngineParts, batch: int, steps: int) -> None:
        self._runner = MixedRunner(parts.runtime.runner)
        self._core = EngineCore(parts.core.scheduler, self._runner)
        self._batch, self._steps = batch, steps
        self._vocabulary = parts.description.vocab_size
        self._random, self._count = random.Random(0), 0

    def seconds(self, slots: list[int]) -> float:
        """Of one decode step, with these slots for the rows."""
        requests = []
        for slot in slots:
            self._count += 1
            prompt = [self._random.randrange(self._vocabulary) for _ in range(PROMPT)]
            params = SamplingParams(max_tokens=self._steps + 1, temperature=0.0, ignore_eos=True)
            requests.append(Request(str(self._count), prompt, params))
            self._runner.slots[requests[-1].request_id] = slot
            self._core.add(requests[-1])
        while any(request.num_output_tokens == 0 for request in requests):
            self._core.step()
        before, began = sum(request.num_output_tokens for request in requests), time.perf_counter()
        while self._core.scheduler.has_work:
            self._core.step()
        tokens = sum(request.num_output_tokens for request in requests) - before
        return (time.perf_counter() - began) * len(slots) / tokens


def measure(model: Path | str, options: EngineConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    parts = build_engine(model, options)
    runner, count = parts.runtime.runner, arguments.adapters
    on_gpu = parts.runtime.model.device.type == "cuda"
    prepared = None
    for slot in range(1, count + 1):
        if prepared is None or not on_gpu:  # on a GPU each slot is memory of its own, whatever is copied there
            prepared = runner.prepare_adapter(make_adapter(parts.description, arguments.rank, slot))
        runner.load_adapter(slot, prepared)
    decoding = Decoding(parts, arguments.batch, arguments.steps)
    plain, mixed = [0] * arguments.batch, [1 + row % count for row in range(arguments.batch)]
    one = [1] * arguments.batch
    for slots in (plain, mixed, one, plain, mixed, one):  # compiles and captures
        decoding.seconds(slots)
    gc.freeze()
    times: dict[str, list[float]] = {"without": [], "mixed": [], "one": []}
    for _ in range(arguments.rounds):
        times["without"].append(decoding.seconds(plain))
        times["mixed"].append(decoding.seconds(mixed))
        times["one"].append(decoding.seconds(one))
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = [with_them / without for with_them, without in zip(times["mixed"], times["without"], strict=True)]
    base, adapters = parts.runtime.model.weight_bytes, count * prepared.nbytes if prepared is not None else 0
    parts.close()
    return {
        "engine": "tokenmill",
        "without_ms": 1e3 * medians["without"],
        "with_ms": 1e3 * medians["mixed"],
        "one_adapter_ms": 1e3 * medians["one"],
        "ratio": statistics.median(ratios),
        "best_ratio": min(times["mixed"]) / min(times["without"]),
        "base_MB": base / 1e6,
        "adapters_MB": adapters / 1e6,
    }


def measure_vllm(model: Path, adapter: Path, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """In a process of its own; None (and its words on stderr) if it fails."""
    paths = [str(arguments.vllm_packages)] if arguments.vllm_packages is not None else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    numbers = [str(number) for number in (arguments.batch, arguments.adapters, arguments.rank, arguments.steps)]
    command = [arguments.vllm_python, str(VLLM_SCRIPT), str(model), str(adapter), *numbers]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=arguments.vllm_timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its engine is a process of its own
            output, _ = process.communicate()
    for line in output.splitlines():
        if line.startswith('{"engine"'):
            figures: dict[str, Any] = json.loads(line)
            return figures
    print(f"vLLM ended with status {process.returncode}", file=sys.stderr)
    return None


def show(figures: dict[str, Any], out: Path | None) -> None:
    line = json.dumps({key: round(each, 4) if isinstance(each, float) else each for key, each in figures.items()})
    print(line, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="alias, directory or .gguf; cuda: an 8B shape without one")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=32, help="decode steps of a round")
    parser.add_argument("--quantization", default=None, help="fp8 or int4, on a GPU")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM's adapters too, by peers/vllm_lora.py")
    parser.add_argument("--vllm-python", default=sys.executable, help="the Python that has vLLM (default: this one)")
    parser.add_argument("--vllm-packages", type=Path, help="folder with vLLM, put on its PYTHONPATH")
    parser.add_argument("--vllm-timeout", type=float, default=150.0, help="seconds until vLLM is given up")
    parser.add_argument("--out", type=Path, help="file that figures are appended to")
    arguments = parser.parse_args()
    dummy = arguments.device == "cuda" and not arguments.model
    options = EngineConfig(
        device=arguments.device,
        threads=arguments.threads or None,
        context=2048 if dummy else 512,
        concurrency=max(32, arguments.batch),
        batch_tokens=2048,
        prefix_caching=False,  # the same prompt has other keys under another adapter
        load_format="dummy" if dummy else "auto",
        quantization=arguments.quantization,
        enable_lora=True,
        max_loras=arguments.adapters,
        max_lora_rank=arguments.rank,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model: Path | str = write_model(folder / "model") if dummy else arguments.model or "smollm2"
        theirs = None
        if arguments.vllm and dummy:
            assert isinstance(model, Path)
            description = open_source(model, "dummy").description
            adapter = make_adapter(description, arguments.rank, 1)
            write_adapter(adapter, folder / "adapter", dtype=torch.bfloat16)
            theirs = measure_vllm(model, folder / "adapter", arguments)
            if theirs is not None:
                show(theirs, arguments.out)
        ours = measure(model, options, arguments)
        show(ours, arguments.out)
    share = ours["adapters_MB"] / ours["base_MB"]
    print(
        f"a step of {arguments.batch} rows with {arguments.adapters} adapters of rank {arguments.rank}: "
        f"{ours['with_ms']:.3f} ms, without {ours['without_ms']:.3f} ms: {ours['ratio']:.3f}x "
        f"(all rows one adapter: {ours['one_adapter_ms']:.3f} ms); adapters are {share:.1%} of the base's bytes"
    )
    if theirs is not None:
        print(
            f"vLLM: {theirs['with_ms']:.3f} ms, without {theirs['without_ms']:.3f} ms: {theirs['ratio']:.3f}x; "
            f"with adapters we are {theirs['with_ms'] / ours['with_ms']:.2f} times as fast"
        )


if __name__ == "__main__":
    main()
