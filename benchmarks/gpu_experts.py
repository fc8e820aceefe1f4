"""The experts of one layer on a GPU against their floor: the bytes of the experts hit, or the operations of all rows.

    python benchmarks/gpu_experts.py [--tune] [--only TEXT] [--tokens 1 4 ...] [--seconds 170] [--json FILE]

Made-up weights in the shapes of Qwen3-30B-A3B, DeepSeek-V2-Lite and GPT-OSS-20B. A row of the table is the median of
replays of a graph that holds whole layers (routing from logits on) for several sets of tokens, so that other experts
are hit each time; results are compared with float32 first. Floor: the larger of the bytes of the distinct experts hit
at 4.8 TB/s and 2 * tokens * experts per token * weights of an expert at 790 TFLOP/s (float8: 1,580). `--tune` also
times every candidate of the chooser, the two products by themselves. Kernels are compiled beforehand, in parallel.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_timing import error, median_us
from tokenmill.kernels.triton.experts import stack as stacks
from tokenmill.kernels.triton.experts.choose import GEMV, Plan, candidates
from tokenmill.kernels.triton.experts.gemv import down_gemv, gate_up_gemv
from tokenmill.kernels.triton.experts.layer import GpuExperts
from tokenmill.kernels.triton.experts.order import sort_by_expert
from tokenmill.kernels.triton.experts.product import grouped_product
from tokenmill.kernels.triton.experts.route import route
from tokenmill.kernels.triton.experts.rows import quantize_groups

DEVICE = torch.device("cuda", 0)
BYTES, FLOPS = 4.8e12, {"fp8": 1580e12}
DEFAULT_FLOPS = 790e12
TOKENS = (1, 4, 16, 64, 256, 4096)
ERRORS = {"bf16": 0.01, "fp8": 0.06, "int4": 0.015, "mxfp4": 0.015}  # of kernels; weights are compared as rounded
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Model:
    hidden: int
    inner: int
    experts: int
    top_k: int
    clamp: float = 0.0  # GPT-OSS: with biases, weighted by a softmax of the selected
    normalize: bool = True

    @property
    def spec(self) -> SimpleNamespace:
        return SimpleNamespace(
            experts_per_token=self.top_k,
            score="softmax_of_selected" if self.clamp else "softmax",
            normalize=self.normalize,
            scale=1.0,
            num_groups=1,
            top_groups=1,
            group_score="max",
            correction_bias=None,
            activation="silu",
            clamp=self.clamp,
            weights_on_input=False,
        )


MODELS = {
    "qwen3-30b-a3b": Model(2048, 768, 128, 8),
    "deepseek-v2-lite": Model(2048, 1408, 64, 6, normalize=False),
    "gpt-oss-20b": Model(2880, 2880, 32, 4, clamp=7.0),
}
CASES = (
    ("qwen3-30b-a3b", "bf16"),
    ("qwen3-30b-a3b", "fp8"),
    ("gpt-oss-20b", "mxfp4"),
    ("deepseek-v2-lite", "bf16"),
    ("qwen3-30b-a3b", "int4"),
)


def random_stack(
    kind: str, experts: int, rows: int, depth: int, bias: bool, halves: int
) -> tuple[stacks.GpuExpertStack, Callable[[int], Tensor], Tensor | None]:
    """A stack, its matrices in float32 by expert, and its biases."""
    shift = torch.randn(experts, rows, device=DEVICE) * 0.3 if bias else None
    if kind == "bf16":
        values = torch.empty(experts, rows, depth, device=DEVICE, dtype=torch.bfloat16).normal_(std=depth**-0.5)
        return stacks.bf16_stack(values, shift), lambda e: values[e].float(), shift
    if kind == "fp8":
        codes = torch.empty(experts, rows, depth, device=DEVICE, dtype=torch.float8_e4m3fn)
        for expert in range(experts):
            codes[expert] = (torch.randn(rows, depth, device=DEVICE) * 30).to(torch.float8_e4m3fn)
        blocks = -(-rows // halves // 128), -(-depth // 128)
        scales = (torch.rand(experts, halves, *blocks, device=DEVICE) + 0.5) * 0.03 * depth**-0.5

        def dense(e: int) -> Tensor:
            wide = scales[e].repeat_interleave(128, 1)[:, : rows // halves].flatten(0, 1)
            return codes[e].float() * wide.repeat_interleave(128, 1)[:, :depth]

        return stacks.fp8_stack(codes, scales.flatten(1, 2), shift, halves), dense, shift
    if kind == "int4":
        whole = torch.randint(-8, 8, (experts, rows, depth), device=DEVICE, dtype=torch.int8)
        by = (torch.rand(experts, rows, depth // 128, device=DEVICE) + 0.5) * 0.2 * depth**-0.5
        stack = stacks.int4_stack(whole, by, None, shift)
        return stack, lambda e: whole[e].float() * by[e].repeat_interleave(128, 1), shift
    packed = torch.randint(0, 256, (experts, rows, depth // 2), device=DEVICE, dtype=torch.uint8)
    exponents = torch.randint(117, 122, (experts, rows, depth // 32), device=DEVICE, dtype=torch.uint8)
    steps = torch.tensor(E2M1, device=DEVICE)

    def values_of(e: int) -> Tensor:
        nibbles = torch.stack((packed[e] & 15, packed[e] >> 4), -1).flatten(1).long()
        signs = torch.where(nibbles > 7, -1.0, 1.0)
        return steps[nibbles & 7] * signs * torch.exp2(exponents[e].float() - 127).repeat_interleave(32, 1)

    return stacks.mxfp4_stack(packed, exponents, shift), values_of, shift


class Layer:
    """A layer of experts, and the same in float32."""

    def __init__(self, name: str, kind: str) -> None:
        self.model = model = MODELS[name]
        biases = model.clamp > 0
        up = random_stack(kind, model.experts, 2 * model.inner, model.hidden, biases, 2)
        down = random_stack(kind, model.experts, model.hidden, model.inner, biases, 1)
        self._dense = up[1:], down[1:]
        self.gpu = GpuExperts(up[0], down[0], model.spec)

    def reference(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        (up, up_bias), (down, down_bias) = self._dense
        y = torch.zeros_like(x, dtype=torch.float32)
        for token in range(x.shape[0]):
            for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
                both = up(expert) @ x[token].float()
                both = both if up_bias is None else both + up_bias[expert]
                gate, other = both.chunk(2)
                if self.model.clamp:
                    gate, other = gate.clamp(max=self.model.clamp), other.clamp(-self.model.clamp, self.model.clamp) + 1
                    inner = gate * torch.sigmoid(1.702 * gate) * other
                else:
                    inner = torch.nn.functional.silu(gate) * other
                out = down(expert) @ inner
                y[token] += weight * (out if down_bias is None else out + down_bias[expert])
        return y


@dataclass
class Inputs:
    """One set of tokens and what each part of a layer reads."""

    x: Tensor
    logits: Tensor
    ids: Tensor
    weights: Tensor


def make_inputs(layer: Layer, tokens: int) -> Inputs:
    model = layer.model
    x = torch.randn(tokens, model.hidden, device=DEVICE, dtype=torch.bfloat16)
    logits = torch.randn(tokens, model.experts, device=DEVICE)
    return Inputs(x, logits, *route(logits, model.spec))


def time_parts(layer: Layer, sets: list[Inputs], plan: Plan) -> dict[str, float]:
    """The two products by themselves, and what precedes them."""
    experts, spec, top_k = layer.gpu, layer.model.spec, layer.model.top_k
    first, second = [], []
    fp8 = experts.gate_up.kind == "fp8"
    for each in sets:
        if plan.kernel == GEMV:
            first.append(lambda i=each: gate_up_gemv(i.x, experts.gate_up, i.ids, None, plan.gate_up, spec.clamp))
            hidden = first[-1]()
            second.append(lambda i=each, h=hidden: down_gemv(h, experts.down, i.ids, i.weights, plan.down))
            continue
        order = sort_by_expert(each.ids, layer.model.experts, plan.tokens)
        codes, scales = quantize_groups(each.x) if fp8 else (each.x, None)
        ask = (order, top_k, plan.tokens)
        first.append(
            lambda c=codes, s=scales, a=ask: grouped_product(
                c, experts.gate_up, *a, plan.gate_up, None, s, True, spec.clamp
            )
        )
        hidden = first[-1]()
        codes, scales = quantize_groups(hidden) if fp8 else (hidden, None)
        second.append(
            lambda c=codes, s=scales, a=ask, w=each.weights: grouped_product(c, experts.down, *a, plan.down, w, s)
        )
    routing = [lambda i=each: route(i.logits, spec) for each in sets]
    parts = {"route": median_us(routing), "gate_up": median_us(first), "down": median_us(second)}
    if plan.kernel != GEMV:
        sorts = [lambda i=each: sort_by_expert(i.ids, layer.model.experts, plan.tokens) for each in sets]
        parts["sort"] = median_us(sorts)
    return parts


def measure(layer: Layer, name: str, kind: str, tokens: int, tune: bool) -> dict[str, Any]:
    model, experts = layer.model, layer.gpu
    sets = [make_inputs(layer, tokens) for _ in range(12 if tokens <= 16 else 4)]
    few = sets[0]
    checked = min(tokens, 3)
    wanted = layer.reference(few.x[:checked], few.ids[:checked], few.weights[:checked])
    wrong = error(experts(few.x, few.logits)[:checked], wanted)
    assert wrong < ERRORS[kind], (name, kind, tokens, wrong)
    us = median_us([lambda i=each: experts(i.x, i.logits) for each in sets])
    hit = sum(int(each.ids.unique().numel()) for each in sets) / len(sets)
    moved = hit * (experts.gate_up.expert_bytes + experts.down.expert_bytes)
    operations = 2 * tokens * model.top_k * 3 * model.hidden * model.inner
    floor = max(moved / BYTES, operations / FLOPS.get(kind, DEFAULT_FLOPS)) * 1e6
    plan = experts.choose(tokens)
    row: dict[str, Any] = {
        "model": name,
        "kind": kind,
        "tokens": tokens,
        "us": us,
        "floor_us": floor,
        "of_floor": floor / us,
        "tb_s": moved / us / 1e6,
        "tflop_s": operations / us / 1e6,
        "experts_hit": hit,
        "error": wrong,
        "plan": asdict(plan),
        "parts": time_parts(layer, sets, plan),
    }
    if tune:
        row["candidates"] = tune_plans(layer, sets, kind, tokens)
    return row


def tune_plans(layer: Layer, sets: list[Inputs], kind: str, tokens: int) -> list[dict[str, Any]]:
    """Both products of every candidate; for each tile of tokens the best of both, the best tile first."""
    model, found = layer.model, []
    for plan in candidates(kind, model.experts, model.top_k, tokens, model.inner):
        try:
            parts = time_parts(layer, sets[:4], plan)
        except Exception as problem:  # a plan that does not fit this GPU is no candidate
            print(f"  {plan}: {type(problem).__name__}: {str(problem)[:120]}")
            continue
        found.append((plan, parts))
    best = []
    for kernel, size in dict.fromkeys((plan.kernel, plan.tokens) for plan, _ in found):
        same = [(plan, parts) for plan, parts in found if (plan.kernel, plan.tokens) == (kernel, size)]
        first = min(same, key=lambda pair: pair[1]["gate_up"])
        second = min(same, key=lambda pair: pair[1]["down"])
        merged = replace(first[0], down=second[0].down)
        rest = same[0][1].get("sort", 0.0)
        best.append({"plan": asdict(merged), "gate_up": first[1]["gate_up"], "down": second[1]["down"], "sort": rest})
    best.sort(key=lambda each: each["gate_up"] + each["down"] + each["sort"])
    everything = [{"plan": asdict(plan), **parts} for plan, parts in found]
    return [*best, {"all": everything}]


@cache
def small_layer(name: str, kind: str) -> GpuExperts:
    """Two experts: their kernels are those of all of them."""
    model = MODELS[name]
    biases = model.clamp > 0
    up, _, _ = random_stack(kind, 2, 2 * model.inner, model.hidden, biases, 2)
    down, _, _ = random_stack(kind, 2, model.hidden, model.inner, biases, 1)
    return GpuExperts(up, down, model.spec)


def compile_plan(name: str, kind: str, tokens: int, plan: Plan) -> str:
    """Launch once with two experts, so that the kernels are in the cache of the disk."""
    model, layer = MODELS[name], small_layer(name, kind)
    x = torch.zeros(tokens, model.hidden, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.arange(tokens * model.top_k, device=DEVICE, dtype=torch.int32).view(tokens, -1) % 2
    try:
        route(torch.zeros(tokens, model.experts, device=DEVICE), model.spec)
        sort_by_expert(ids, model.experts, plan.tokens or 16)
        layer.multiply(x, ids, torch.ones(tokens, model.top_k, device=DEVICE), plan)
        torch.cuda.synchronize()
    except Exception as problem:  # reported where it is timed
        return f"{type(problem).__name__}: {str(problem)[:100]}"
    return ""


def compile_all(cases: list[tuple[str, str]], tokens: list[int], tune: bool) -> None:
    begin = time.perf_counter()
    tasks = []
    for name, kind in cases:
        model = MODELS[name]
        for count in tokens:
            plans = candidates(kind, model.experts, model.top_k, count, model.inner)
            tasks += [(name, kind, count, plan) for plan in (plans if tune else plans[:1])]
    workers = min(12, max(1, (os.cpu_count() or 2) - 2), len(tasks))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        problems = [problem for problem in pool.map(compile_plan, *zip(*tasks, strict=True)) if problem]
    print(f"{len(tasks)} plans compiled by {workers} processes in {time.perf_counter() - begin:.0f} s", problems[:4])


def line(row: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {us:.1f}" for name, us in row["parts"].items())
    return (
        f"{row['model']:17s} {row['kind']:6s} {row['tokens']:5d}  {row['us']:9.1f} us  floor {row['floor_us']:8.1f}  "
        f"{100 * row['of_floor']:5.1f} %  {row['tb_s']:5.2f} TB/s {row['tflop_s']:6.1f} TFLOP/s  "
        f"{row['experts_hit']:5.1f} experts  error {row['error']:.1e}  ({parts})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--only", default="", help="part of a model and kind, such as 'qwen3-30b-a3b fp8'")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--seconds", type=float, default=170.0, help="no case is started after this time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begin = time.perf_counter()
    cases = [case for case in CASES if options.only in " ".join(case)]
    compile_all(cases, options.tokens, options.tune)
    rows: list[dict[str, Any]] = []
    for name, kind in cases:
        if time.perf_counter() - begin > options.seconds:
            print(f"left out for lack of time: {name} {kind}")
            continue
        layer = Layer(name, kind)
        for tokens in options.tokens:
            try:
                rows.append(measure(layer, name, kind, tokens, options.tune))
            except Exception as problem:  # the other rows are still worth having
                print(f"{name} {kind} {tokens}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
                continue
            print(line(rows[-1]), flush=True)
            for found in rows[-1].get("candidates", [])[:2]:
                print(f"    {found['gate_up']:.1f} + {found['down']:.1f} + {found['sort']:.1f} us by {found['plan']}")
            if options.json:
                options.json.write_text(json.dumps({"rows": rows}, indent=1))
        del layer
        torch.cuda.empty_cache()
    print(f"{len(rows)} rows in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
