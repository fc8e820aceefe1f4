"""The recurrent ops of one layer on a GPU against their floor: the bytes they move or the operations they do.

    python benchmarks/gpu_recurrent.py [--quick] [--tune] [--only TEXT] [--rows 1 64] [--prompts 1x512] [--json FILE]

Made-up inputs in the shapes of an 8B Mamba-2 hybrid (Bamba-9B's mixer: 128 heads of 64, states of 128, one group) and,
beside it, of Qwen3-Next (gated delta rule) and Jamba (Mamba). A row of the table is the median of replays of a graph
of one op over several sets of state slots, so that no state is in the cache already; results are compared with the
torch spec first. Floor: the larger of bytes (inputs, outputs and states, each once in each direction) at 4.8 TB/s and
operations at 790 TFLOP/s (the chunked form's products; convolution, norm and Mamba's scan have none). `convolved` is
the scan of a step that computes the convolution too, where the chooser wants that; `whole` is the sum of what a layer
launches: convolution, scan and norm. `--tune` also times every candidate tile of the scans (choose.py). `--quick`: the
shapes that say most, in about a minute, most of it compilation. Exit status 1 if a row failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_timing import error, median_us
from tokenmill.kernels import ref_recurrent as ref
from tokenmill.kernels import triton as gpu
from tokenmill.kernels.triton.recurrent.choose import candidates, convolves

DEVICE = torch.device("cuda", 0)
BYTES, FLOPS = 4.8e12, 790e12
ROWS = (1, 64, 256)
PROMPTS = ("1x512", "1x2048", "1x8192", "8x1024")
QUICK_PROMPTS = ("1x2048", "8x1024")
MAX_STATE_BYTES = 40 << 30  # of all sets of slots
ERROR = 2e-2  # bf16 rows against float32


@dataclass(frozen=True)
class Layer:
    """A mixer: the widths of its convolution and of its inputs, its state, its norm."""

    scan: str
    convolved: int
    convolution: int  # inputs of an output
    state: tuple[int, ...]
    inner: int  # width of its output
    norm: tuple[int, ...]  # shape of the norm's weight, () for none
    widths: tuple[int, ...]  # of the inputs of the scan

    def arguments(self) -> tuple[Any, ...]:
        heads = self.state[0]
        decays, ones = -torch.rand(heads, device=DEVICE) - 0.2, torch.ones(heads, device=DEVICE)
        if self.scan == "mamba_scan":
            return -torch.rand(self.state, device=DEVICE) - 0.2, ones
        if self.scan == "mamba2_scan":
            return decays, ones, -3 * ones, 1
        return decays, ones, 16

    def operations(self, tokens: int) -> float:
        """Of the chunked forms' products with chunks of 64 rows (scores, outputs, states), as few as there can be."""
        if self.scan == "mamba_scan":
            return 0.0
        heads, rows, columns = self.state
        return 2.0 * tokens * heads * (64 * columns / 2 + 64 * rows / 2 + 2 * rows * columns)


LAYERS = {
    "mamba2 8B hybrid": Layer("mamba2_scan", 8192 + 2 * 128, 4, (128, 64, 128), 8192, (1, 8192), (8192 + 2 * 128, 128)),
    "qwen3-next": Layer("delta_scan", 2 * 2048 + 4096, 4, (32, 128, 128), 4096, (128,), (2 * 2048 + 4096, 32, 32)),
    "jamba": Layer("mamba_scan", 8192, 4, (8192, 16), 8192, (), (8192, 8192, 16, 16)),
}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def check(op: str, inputs: list[Tensor], states: Tensor, slots: Tensor, starts: Tensor, arguments: Any) -> float:
    """The largest error of rows and states of the first sequence, of at most 300 rows of it."""
    count = min(int(starts[1]), 300)
    first, ends = [each[:count] for each in inputs], torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
    own, zero = states[slots[:1]].clone(), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    copy = own.clone()
    got = getattr(gpu, op)(*first, copy, zero, ends, *arguments)
    wanted = getattr(ref, op)(*(each.float() for each in first), own, zero, ends, *arguments)
    return max(error(got, wanted), error(copy, own))


def measure_op(
    op: str,
    widths: tuple[int, ...],
    state: tuple[int, ...],
    arguments: Any,
    num_seqs: int,
    length: int,
    flops: float,
    tune: bool = False,
) -> dict[str, Any]:
    tokens, state_bytes = num_seqs * length, 4 * torch.Size(state).numel()
    sets = max(1, min(4, MAX_STATE_BYTES // (num_seqs * state_bytes)))
    states = torch.randn(sets * num_seqs, *state, device=DEVICE)
    inputs = [random(tokens, width) for width in widths]
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE) * length
    slots = torch.randperm(sets * num_seqs, device=DEVICE).view(sets, num_seqs)
    wrong = check(op, inputs, states, slots[0], starts, arguments)
    assert wrong < ERROR, (op, num_seqs, length, wrong)
    run = getattr(gpu, op)
    out = run(*inputs, states, slots[0], starts, *arguments)
    us = median_us([partial(run, *inputs, states, own, starts, *arguments) for own in slots])
    moved = 2 * (sum(each.numel() for each in inputs) + out.numel()) + 2 * num_seqs * state_bytes
    found = {"us": us, "floor_us": max(moved / BYTES, flops / FLOPS) * 1e6, "moved": moved, "error": wrong}
    if not tune:
        return found
    times = []
    for tiling in candidates(op, length == 1):
        calls = [partial(run, *inputs, states, own, starts, *arguments, tiling=tiling) for own in slots]
        try:
            times.append((median_us(calls, 5), tiling._asdict()))
        except Exception as problem:  # a tile that does not fit this GPU is no candidate
            print(f"  {tiling}: {type(problem).__name__}: {str(problem)[:120]}")
    return found | {"tilings": sorted(times, key=lambda pair: pair[0])}


def measure_convolved(layer: Layer, kernel: gpu.Convolution, num_seqs: int) -> dict[str, Any]:
    """A step of convolution and scan in one launch; states go from one set of slots to the next."""
    kept, state = kernel.states.shape[1:], layer.state
    state_bytes = 4 * (torch.Size(state).numel() + kept.numel())
    sets = max(2, min(4, MAX_STATE_BYTES // (num_seqs * state_bytes)))
    states = torch.randn(sets * num_seqs, *state, device=DEVICE)
    kernel = kernel._replace(states=torch.randn(sets * num_seqs, *kept, device=DEVICE))
    inputs, arguments = [random(num_seqs, width) for width in layer.widths], layer.arguments()
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE)
    slots = torch.randperm(sets * num_seqs, device=DEVICE).view(sets, num_seqs)
    spec_states, spec_kept = states[slots[0]], kernel.states[slots[0]]
    order = torch.arange(num_seqs, device=DEVICE)
    rows = ref.convolve(inputs[0].float(), spec_kept, order, starts, *kernel[1:])
    others = [each.float() for each in inputs[1:]]
    wanted = getattr(ref, layer.scan)(rows, *others, spec_states, order, starts, *arguments)
    run = partial(getattr(gpu, layer.scan), *inputs, states)
    out = run(slots[0], starts, *arguments, targets=slots[1], convolution=kernel)
    got = ((out, wanted), (states[slots[1]], spec_states), (kernel.states[slots[1]], spec_kept))
    wrong = max(error(*pair) for pair in got)
    assert wrong < ERROR, (layer.scan, num_seqs, "convolved", wrong)
    us = median_us(
        [
            partial(run, slots[i], starts, *arguments, targets=slots[(i + 1) % sets], convolution=kernel)
            for i in range(sets)
        ]
    )
    moved = 2 * (sum(each.numel() for each in inputs) + out.numel()) + 2 * num_seqs * state_bytes
    return {"us": us, "floor_us": moved / BYTES * 1e6, "moved": moved, "error": wrong}


def measure_norm(layer: Layer, tokens: int) -> dict[str, Any]:
    sets = [(random(tokens, layer.inner), random(tokens, layer.inner)) for _ in range(4)]
    weight, moved = torch.rand(layer.norm, device=DEVICE), 3 * 2 * tokens * layer.inner
    norm_first = len(layer.norm) == 1
    wanted = ref.gated_norm(sets[0][0].float(), sets[0][1].float(), weight, 1e-5, norm_first)
    wrong = error(gpu.gated_norm(*sets[0], weight, 1e-5, norm_first), wanted)
    assert wrong < ERROR, wrong
    us = median_us([partial(gpu.gated_norm, *each, weight, 1e-5, norm_first) for each in sets])
    return {"us": us, "floor_us": moved / BYTES * 1e6, "moved": moved, "error": wrong}


def measure(name: str, layer: Layer, num_seqs: int, length: int, tune: bool) -> list[dict[str, Any]]:
    tokens = num_seqs * length
    weight = torch.randn(layer.convolution, layer.convolved, device=DEVICE) * 0.3
    bias = torch.randn(layer.convolved, device=DEVICE) * 0.1
    kept = (layer.convolution - 1, layer.convolved)
    parts = {
        "convolve": measure_op("convolve", (layer.convolved,), kept, (weight, bias), num_seqs, length, 0.0),
        layer.scan: measure_op(
            layer.scan, layer.widths, layer.state, layer.arguments(), num_seqs, length,
            layer.operations(tokens) if length > 1 else 0.0, tune,
        ),
    }  # fmt: skip
    if layer.norm:
        parts["gated_norm"] = measure_norm(layer, tokens)
    launched = list(parts.values())
    if length == 1 and layer.scan != "mamba_scan" and convolves(num_seqs):
        convolution = gpu.Convolution(torch.empty(1, *kept, device=DEVICE), weight, bias)
        parts["convolved"] = measure_convolved(layer, convolution, num_seqs)
        launched = [parts["convolved"], *launched[2:]]
    whole = {key: sum(part[key] for part in launched) for key in ("us", "floor_us", "moved")}
    whole["error"] = max(part["error"] for part in parts.values())
    rows = [{"layer": name, "sequences": num_seqs, "length": length, "op": op, **part} for op, part in parts.items()]
    return [*rows, {"layer": name, "sequences": num_seqs, "length": length, "op": "whole", **whole}]


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['layer']:17s} {row['sequences']:4d} x {row['length']:5d}  {row['op']:12s} {row['us']:9.1f} us  "
        f"floor {row['floor_us']:8.1f}  {100 * row['floor_us'] / row['us']:5.1f} %  "
        f"{row['moved'] / row['us'] / 1e6:5.2f} TB/s  error {row['error']:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer prompts")
    parser.add_argument("--tune", action="store_true", help="time every candidate tile of the scans")
    parser.add_argument("--only", default="", help="part of a layer's name")
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS), help="sequences of decode steps")
    parser.add_argument("--prompts", nargs="*", default=list(PROMPTS), help="sequences x tokens")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begin, failures = time.perf_counter(), 0
    print(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    if options.quick:
        options.prompts = list(QUICK_PROMPTS)
    torch.manual_seed(0)
    shapes = [(rows, 1) for rows in options.rows]
    shapes += [(int(count), int(length)) for count, length in (text.split("x") for text in options.prompts)]
    found: list[dict[str, Any]] = []
    for name, layer in LAYERS.items():
        if options.only not in name:
            continue
        for num_seqs, length in shapes:
            try:
                rows = measure(name, layer, num_seqs, length, options.tune)
            except Exception as problem:  # the other rows are still worth having
                failures += 1
                print(f"FAILED {name} {num_seqs} x {length}: {type(problem).__name__}: {str(problem)[:2000]}")
                traceback.print_tb(problem.__traceback__, limit=-6, file=sys.stdout)
                sys.stdout.flush()
                continue
            found += rows
            print("\n".join(map(line, rows)), flush=True)
            for us, tiling in [pair for row in rows for pair in row.get("tilings", [])[:4]]:
                print(f"    {us:9.1f} us by {tiling}", flush=True)
            torch.cuda.empty_cache()
            if options.json:
                options.json.write_text(json.dumps({"rows": found}, indent=1))
    print(f"{len(found)} rows, {failures} failures, {time.perf_counter() - begin:.0f} s")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
