"""Each GPU kernel against its floor: the bytes it must move or the operations it must do, at this GPU's measured rates.

    python benchmarks/gpu_kernels.py [--tune] [linear w4a8 int4 attention small sampling]

Shapes are Llama-3.1-8B's. Every figure is the median of graph replays over rotating weights (several times the cache),
and kernels are compared with a float64 twin on the same random inputs first. `--tune` measures and stores plans before.
`int4` has every plan of few tokens times 4-bit weights by itself;
`w4a8` sets 4-bit groups of 128 with float8 inputs beside W4A16 and FP8, every plan of W4A8 by itself.
"""

# ruff: noqa: B023 (calls are timed inside the loop that makes them)
from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tokenmill.kernels import ref
from tokenmill.kernels import triton as gpu
from tokenmill.kernels.triton.fused.elementwise import quantize_rows
from tokenmill.kernels.triton.matmul.choose import candidates
from tokenmill.kernels.triton.matmul.linear import DenseLinear, GpuLinear, GroupedLinear, ScaledLinear
from tokenmill.kernels.triton.matmul.make import quantize_at_load

DEVICE = torch.device("cuda", 0)
LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, INNER, VOCAB = 32, 32, 8, 128, 4096, 14336, 128256
SHAPES = {"qkv": (6144, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
COLD_BYTES = 300e6  # rotate over at least this much


def median_us(calls: list[Callable[[], object]], launches: int = 24) -> float:
    """Microseconds per call inside a captured graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    launches = max(launches, len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(launches):
            calls[number % len(calls)]()
    graph.replay()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / launches * 1e3)
    return sorted(times)[3]


class Limits:
    """What this GPU does at best, measured now: bytes and operations per microsecond."""

    def __init__(self) -> None:
        source = torch.randn(1 << 30, device=DEVICE)
        target = torch.empty_like(source)
        self.bytes = 8 * source.numel() / median_us([lambda: torch.neg(source, out=target)], 5)
        a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        self.flops = 2 * 8192**3 / median_us([lambda: torch.mm(a, b)], 5)
        c, one = a.to(torch.float8_e4m3fn), torch.ones(8192, device=DEVICE)
        run = lambda: torch._scaled_mm(c, c.T, one[:, None], one[None], out_dtype=torch.bfloat16, use_fast_accum=True)  # noqa: E731
        self.flops8 = 2 * 8192**3 / median_us([run], 5)
        rates = self.bytes / 1e6, self.flops / 1e6, self.flops8 / 1e6
        print("copy {:.2f} TB/s, bf16 {:.0f} TFLOP/s, fp8 {:.0f} TFLOP/s".format(*rates))


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def line(name: str, us: float, floor: float, wrong: float, note: str = "") -> None:
    print(
        f"{name:34s} {us:9.2f} us   floor {floor:8.2f}   {100 * floor / us:5.1f} %   error {wrong:.1e}  {note}",
        flush=True,
    )


def linears(scheme: str, shape: str) -> tuple[list[GpuLinear], Tensor]:
    """Enough copies of a product to be cold, and the exact matrix of the first (some rows)."""
    rows, depth = SHAPES[shape]
    size = rows * depth * {"bf16": 2, "fp8": 1, "int8": 1, "int4": 0.52, "w4a8": 0.52}[scheme]
    made = []
    exact = torch.empty(0)
    for number in range(max(1, math.ceil(COLD_BYTES / size))):
        values = torch.randn(rows, depth, device=DEVICE, dtype=torch.bfloat16)
        if scheme == "bf16":
            made.append(DenseLinear(values, None))
        else:
            made.append(quantize_at_load(values, None, scheme))
        if number == 0:
            exact = values[:256].double()
    return made, exact


def bench_linear(limits: Limits, tune: bool) -> None:
    totals: dict[tuple[str, int], float] = {}
    # What rounding costs, not the kernel.
    loss = {"bf16": 0.0, "fp8": 0.04, "int8": 0.02, "int4": 0.12, "w4a8": 0.13}
    for scheme in loss:
        for shape, (rows, depth) in SHAPES.items():
            made, exact = linears(scheme, shape)
            for tokens in (1, 8, 32, 64, 128, 256):
                if tune:
                    made[0].tune(tokens)
                x = torch.randn(tokens, depth, device=DEVICE, dtype=torch.bfloat16)
                quantized = quantize_rows(x, made[0].activations) if made[0].activations else None
                calls = [
                    (lambda each=each: each.multiply_quantized(*quantized))
                    if quantized
                    else (lambda each=each: each(x))
                    for each in made
                ]
                us = median_us(calls)
                flops = limits.flops8 if scheme in ("fp8", "int8", "w4a8") else limits.flops
                floor = max(made[0].nbytes / limits.bytes, 2 * tokens * rows * depth / flops)
                wrong = error(made[0](x)[:, :256], x.double() @ exact.T)
                assert wrong < loss[scheme] + 0.01, (scheme, shape, tokens, wrong)
                plan = made[0].choose(tokens)
                line(f"{scheme} {shape} x {tokens}", us, floor, wrong, plan.kernel)
                totals[scheme, tokens] = totals.get((scheme, tokens), 0.0) + us * LAYERS / 1e3
            del made, exact
    for (scheme, tokens), ms in totals.items():
        print(f"all layers, {scheme} x {tokens}: {ms:.3f} ms")


def bench_w4a8(limits: Limits, tune: bool) -> None:
    """Products from inputs that are rounded already, as a fused norm writes them; then each plan of W4A8 that `--tune`
    would try. Compared with the rounded input times the exact weights."""
    for rows, depth in ((4096, 4096), (14336, 4096)):
        values = torch.randn(rows, depth, device=DEVICE, dtype=torch.bfloat16)
        for scheme, size in (("w4a8", 0.52), ("int4", 0.52), ("fp8", 1)):
            copies = max(2, math.ceil(COLD_BYTES / (rows * depth * size)))
            made = [quantize_at_load(values, None, scheme) for _ in range(copies)]
            for tokens in (1, 16, 64, 128, 256, 4096):
                if tune:
                    made[0].tune(tokens)
                _compare_plans(limits, scheme, made, tokens, scheme == "w4a8")


def bench_int4(limits: Limits) -> None:
    """Few tokens times 4-bit weights: every plan by itself."""
    for rows, depth in SHAPES.values():
        values = torch.randn(rows, depth, device=DEVICE, dtype=torch.bfloat16)
        copies = max(2, math.ceil(COLD_BYTES / (rows * depth * 0.52)))
        made = [quantize_at_load(values, None, "int4") for _ in range(copies)]
        for tokens in (1, 4, 16, 32):
            _compare_plans(limits, "int4", made, tokens, every=True)


def _compare_plans(limits: Limits, scheme: str, made: list[GpuLinear], tokens: int, every: bool) -> None:
    first = made[0]
    rows, depth, chosen, exact = first.rows, first.depth, first.choose(tokens), exact_rows(first)
    x = torch.randn(tokens, depth, device=DEVICE, dtype=torch.bfloat16)
    codes, scales = quantize_rows(x, "fp8")
    seen = x.double() if scheme == "int4" else codes.double() * scales.double()[:, None]
    flops = limits.flops if scheme == "int4" else limits.flops8
    floor = max(first.nbytes / limits.bytes, 2 * tokens * rows * depth / flops)
    others = [plan for plan in candidates(first.kind, rows, depth, tokens) if plan != chosen]
    for plan in (chosen, *(others if every else ())):

        def multiply(linear: GpuLinear) -> Tensor:
            if scheme == "int4":
                return linear.multiply(x, plan=plan)
            return linear.multiply_quantized(codes, scales, plan=plan)

        wrong = error(multiply(first)[:, :256], seen @ exact.T)
        assert wrong < 0.01, (scheme, plan, wrong)
        us = median_us([partial(multiply, each) for each in made])
        name = f"{scheme} {rows}x{depth} x {tokens}" if plan == chosen else "  the same by another plan"
        tiling = plan.tiling
        cut = f"{plan.kernel} {tiling.rows}x{tiling.tokens}, {tiling.warps} warps, {tiling.stages} stages"
        cut += f", {tiling.prefetch_lines} lines first" if tiling.prefetch_lines else ""
        line(name, us, floor, wrong, cut)


def exact_rows(linear: GpuLinear) -> Tensor:
    """The first 256 rows of a quantized matrix, in float64."""
    if isinstance(linear, ScaledLinear):
        return linear.codes[:256].double() * linear.scales[:256].double()[:, None]
    assert isinstance(linear, GroupedLinear)
    weight = linear.weight
    words = weight.codes[:, :256]  # [blocks, rows, words]: nibble i of word j is place words * i + j
    nibbles = torch.stack([(words >> (4 * place)) & 15 for place in range(8)], 2).double() - 8
    values = nibbles.permute(1, 0, 2, 3).reshape(256, -1)[:, : weight.depth]
    scales = weight.scales[:, :256].T.double() * weight.row_scale[:256].double()[:, None]
    return values * scales.repeat_interleave(weight.group, 1)[:, : weight.depth]


def attention_step(
    sequences: int, length: int, dtype: torch.dtype, count: int = 1, shared: int = 0, prefixes: int = 1
) -> tuple:
    pages = -(-length // 16)
    shape = (sequences * pages, KV_HEADS, 16, DIM)
    k, v = ((torch.randn(shape, device=DEVICE) * 0.5).to(dtype) for _ in range(2))
    table = torch.randperm(sequences * pages, device=DEVICE).int().view(sequences, pages)
    each = sequences // prefixes
    for first in range(0, sequences, each):
        table[first : first + each, : shared // 16] = table[first, : shared // 16].clone()
    starts = torch.arange(0, sequences * count + 1, count, device=DEVICE, dtype=torch.int32)
    lengths = torch.full((sequences,), length, device=DEVICE, dtype=torch.int32)
    q = torch.randn(sequences * count, HEADS * DIM, device=DEVICE, dtype=torch.bfloat16)
    return q, k, v, table, starts, lengths


def _prefixes(sequences: int, tokens: int, count: int) -> gpu.SharedPrefixes:
    """`count` runs of sequences, each with as many tokens in common."""
    each = sequences // count
    runs = [(first, first + each, tokens) for first in range(0, sequences, each)]
    by_row = torch.full((sequences,), tokens, device=DEVICE, dtype=torch.int32)
    return gpu.SharedPrefixes(torch.tensor(runs, device=DEVICE, dtype=torch.int32), by_row, tokens)


def bench_attention(limits: Limits) -> None:
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float8_e4m3fn, "fp8")):
        ones = torch.ones(KV_HEADS, device=DEVICE)
        scales = (ones, ones) if dtype == torch.float8_e4m3fn else None
        cases = [
            (count, length, 0, 1) for count, length in ((1, 768), (8, 768), (64, 768), (256, 768), (1, 8192), (8, 8192))
        ]
        cases += [(256, 4256, 4096, 1), (256, 2176, 2048, 32), (64, 2176, 2048, 8)]
        for sequences, length, shared, prefixes in cases:
            step = attention_step(sequences, length, dtype, shared=shared, prefixes=prefixes)
            prefix = _prefixes(sequences, shared, prefixes) if shared else None
            bound = length - shared
            run = lambda: gpu.paged_attention(  # noqa: E731
                *step,
                DIM**-0.5,
                max_query=1,
                max_seq=bound,
                scales=scales,
                shared=prefix,
            )
            checked = min(sequences, 2)
            expected = ref.attention(
                step[0][:checked].float(),
                *step[1:3],
                step[3][:checked],
                step[4][: checked + 1],
                step[5][:checked],
                DIM**-0.5,
                0,
                0.0,
            )
            wrong = error(run()[:checked], expected)
            assert wrong < 5e-3, wrong
            keys = sequences * (length - shared) + prefixes * shared
            floor = keys * KV_HEADS * DIM * 2 * step[1].element_size() / limits.bytes
            if shared:
                floor += 4 * sequences * HEADS * DIM * shared / limits.flops
            line(
                f"decode {name} {sequences} x {length}" + (f" shared {prefixes} x {shared}" if shared else ""),
                median_us([run], 12),
                floor,
                wrong,
            )
    _bench_prefill(limits)


def _bench_prefill(limits: Limits) -> None:
    """Whole prompts, prompts after a common beginning, and a chunk of a long one; the library on the first."""
    for sequences, count, length, shared in ((2, 8192, 8192, 0), (128, 128, 4224, 4096), (1, 2048, 32768, 0)):
        step = attention_step(sequences, length, torch.bfloat16, count, shared)
        run = lambda: gpu.paged_attention(*step, DIM**-0.5, max_query=count)  # noqa: E731
        q, k, v, table, _, lengths = step
        tail = torch.tensor([0, 64], dtype=torch.int32)
        expected = ref.attention(q[count - 64 : count].float(), k, v, table[:1], tail, lengths[:1], DIM**-0.5, 0, 0.0)
        wrong = error(run()[count - 64 : count], expected)
        floor = 4 * HEADS * DIM * sequences * count * (length - count / 2) / limits.flops
        line(f"prefill bf16 {sequences} x {count} of {length}", median_us([run], 3), floor, wrong)
        if count == length:
            heads, keys = (torch.randn(sequences, n, length, DIM, device=DEVICE).bfloat16() for n in (HEADS, KV_HEADS))
            attend = torch.nn.functional.scaled_dot_product_attention
            library = lambda: attend(heads, keys, keys, is_causal=True, enable_gqa=True)  # noqa: E731
            line("  the same by the library", median_us([library], 3), floor, 0.0)


def bench_small(limits: Limits) -> None:
    weight = torch.rand(HIDDEN, device=DEVICE)
    angles = torch.rand(8192, DIM // 2, device=DEVICE)
    pages = torch.zeros(2, 64, KV_HEADS, 16, DIM, device=DEVICE, dtype=torch.bfloat16)
    for tokens in (1, 64, 256, 8192):
        x, y = (torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        both = torch.randn(tokens, 2 * INNER, device=DEVICE, dtype=torch.bfloat16)
        qkv = torch.randn(tokens, 6144, device=DEVICE, dtype=torch.bfloat16)
        positions = torch.arange(tokens, device=DEVICE)
        slots = positions % 1024
        _, normed = gpu.add_rms_norm(x, y, weight, 1e-5)
        wrong = error(normed, ref.rms_norm(x.double() + y.double(), weight.double(), 1e-5))
        unit = tokens / limits.bytes
        line(
            f"add_rms_norm x {tokens}",
            median_us([lambda: gpu.add_rms_norm(x, y, weight, 1e-5)]),
            8 * HIDDEN * unit,
            wrong,
        )
        fused = lambda: gpu.add_rms_norm_quantized(x, y, weight, 1e-5, "fp8")  # noqa: E731
        line(f"add_rms_norm + fp8 x {tokens}", median_us([fused]), 7 * HIDDEN * unit, 0.0)
        gate, up = both[:, :INNER], both[:, INNER:]
        wrong = error(gpu.gated(gate, up, "silu"), ref.gated(gate.double(), up.double(), "silu"))
        line(f"silu * up x {tokens}", median_us([lambda: gpu.gated(gate, up, "silu")]), 6 * INNER * unit, wrong)
        quant = lambda: gpu.gated_quantized(gate, up, "silu", "fp8")  # noqa: E731
        line(f"silu * up + fp8 x {tokens}", median_us([quant]), 5 * INNER * unit, 0.0)
        store = lambda: gpu.rope_store(qkv, HEADS, pages[0], pages[1], positions, slots, angles, angles, False)  # noqa: E731
        wrong = error(
            store(),
            ref.rope(qkv[:, :HIDDEN].double().contiguous(), positions, angles.double(), angles.double(), DIM, False),
        )
        line(f"rope + store x {tokens}", median_us([store]), 2 * 2 * 6144 * unit, wrong)


def bench_sampling(limits: Limits) -> None:
    for rows in (1, 64, 256):
        logits = torch.randn(rows, VOCAB, device=DEVICE) * 3
        for name, k, p in (("temperature", 0, 1.0), ("top-k 50", 50, 1.0), ("top-p 0.9", 0, 0.9)):
            tensors = gpu.SamplingTensors(
                torch.full((rows,), 0.6, device=DEVICE),
                torch.full((rows,), k, dtype=torch.int32, device=DEVICE),
                torch.full((rows,), p, device=DEVICE),
                torch.zeros(rows, device=DEVICE),
                torch.arange(rows, device=DEVICE),
                torch.arange(rows, device=DEVICE),
                filtered=bool(k) or p < 1,
            )
            run = lambda: gpu.sample(logits, tensors)  # noqa: E731
            line(f"sample {name} x {rows}", median_us([run]), rows * VOCAB * 4 / limits.bytes, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("what", nargs="*", default=["linear", "w4a8", "int4", "attention", "small", "sampling"])
    options = parser.parse_args()
    limits = Limits()
    if "linear" in options.what:
        bench_linear(limits, options.tune)
    if "w4a8" in options.what:
        bench_w4a8(limits, options.tune)
    if "int4" in options.what:
        bench_int4(limits)
    if "attention" in options.what:
        bench_attention(limits)
    if "small" in options.what:
        bench_small(limits)
    if "sampling" in options.what:
        bench_sampling(limits)


if __name__ == "__main__":
    main()
