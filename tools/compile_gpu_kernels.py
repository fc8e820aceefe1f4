"""Compile GPU kernels for Hopper (sm_90) on a machine without a GPU, as launched for known models: experts (also those
that lie in host memory), attention with sinks, latent attention, float8 weights in blocks, routers, recurrent layers,
adapters; of Llama-3.1-8B in float16 its products and attention, its W4A8 products; attention over quantized pages.

    python -m tools.compile_gpu_kernels [--all] [NAME ...]

Prints registers, spilled bytes, shared memory and the tensor-core instructions of each kernel, and fails where one does
not compile, spills, or needs more shared memory than a processor has. `--all` compiles every candidate of the experts'
chooser, not only what its rule picks. NAMEs are parts of case names ("gpt-oss mxfp4 16", "latent",
"recurrent mamba2"). With the Triton that is imported: `PYTHONPATH` may name another version than the installed one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tokenmill.kernels.triton.shared import launch
from tools.gpu_float16_cases import float16_cases
from tools.gpu_packed_cases import packed_cases
from tools.gpu_w4a8_cases import w4a8_cases

SHARED_BYTES = 232448  # that one program can have on Hopper
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Cases whose tiles hold more sums than registers; smaller ones read more. To be decided by measurement.
KNOWN_SPILLS = (
    *("qwen3-30b fp8 4096", "latent torch.bfloat16 mixed", "latent torch.float8_e4m3fn"),
    # As with bf16.
    *("half attention torch.float8_e4m3fn mixed", "half int4 hopper_wide", "half int4 gated 256", "half int4 zeros"),
    # Of prompts: four accumulators beside four operands. int8 with a float scale: one or two registers.
    *(f"packed {name} 128 mixed" for name in ("int4", "int4_per_token_head", "turboquant4")),
    "packed int8_per_token_head",
    # A few scales of small groups, once a block, beside the sums of tiles of 128 tokens.
    *(f"w4a8 {group} grouped_fp8" for group in ("32", "64", "32 zeros")),
)
TOKENS = (1, 4, 16, 64, 256, 4096)


class Hopper:
    """Stands in for the driver: says what to compile for, launches nothing."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    @staticmethod
    def is_active() -> bool:
        return True


class Compilation:
    """Replaces launches by compilation and reports each new kernel."""

    def __init__(self) -> None:
        self.case, self.failures, self.count = "", 0, 0
        self._seen: set[str] = set()
        self._run = JITFunction.run

    def __call__(self, function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:  # noqa: ARG002
        begin = time.perf_counter()
        try:
            kernel = self._run(function, *args, grid=grid, warmup=True, **options)
        except Exception as problem:  # every way a compiler can fail
            self.failures += 1
            print(f"{self.case:28s} {function.fn.__name__:12s} FAILED: {str(problem)[-300:]}", flush=True)
            return None
        if kernel.hash in self._seen:
            return kernel
        self._seen.add(kernel.hash)
        self.count += 1
        self._report(function.fn.__name__, kernel, time.perf_counter() - begin)
        return kernel

    def _report(self, name: str, kernel: Any, seconds: float) -> None:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage = _tool("cuobjdump", "-res-usage", file.name)
            code = _tool("cuobjdump", "-sass", file.name)
        registers, stack = (int(re.findall(rf"{key}:(\d+)", usage)[-1]) for key in ("REG", "STACK"))
        found = Counter(re.findall(r"\b(HGMMA|QGMMA|IGMMA|HMMA|UTMALDG|LDGSTS|LDL|STL|BAR\.SYNC)\b", code))
        spills = found["LDL"] + found["STL"] > 0 and not self.case.startswith(KNOWN_SPILLS)
        bad = spills or kernel.metadata.shared > SHARED_BYTES
        self.failures += bad
        print(
            f"{self.case:28s} {name:12s} {registers:4d} registers, {stack:4d} stack, {kernel.metadata.shared} shared, "
            f"{dict(found)} {seconds:.1f} s{'  BAD' if bad else ''}",
            flush=True,
        )


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([str(BINARIES / name), *arguments], capture_output=True, text=True, check=True).stdout


def _stack(kind: str, experts: int, rows: int, depth: int, bias: bool, gated: bool) -> Any:
    """Unwritten memory in the shape of a stack: nothing is computed here."""
    from tokenmill.kernels.triton.experts.stack import GpuExpertStack, StackTensors

    total = experts * rows
    shift = torch.empty(total) if bias else None
    if kind == "bf16":
        tensors = StackTensors(torch.empty(total, depth, dtype=torch.bfloat16), None, None, None, shift)
        return GpuExpertStack(kind, experts, rows, depth, 0, tensors)
    if kind == "fp8":
        codes = torch.empty(total, depth, dtype=torch.float8_e4m3fn)
        halves = 2 if gated else 1
        scales = torch.empty(experts, halves * -(-rows // halves // 128), -(-depth // 128))
        return GpuExpertStack(kind, experts, rows, depth, 128, StackTensors(codes, scales, None, None, shift))
    words = 32 if kind == "int4" and depth % 256 == 0 else 16
    blocks = -(-depth // (8 * words))
    codes = torch.empty(blocks, total, words, dtype=torch.int32)
    row_scale = torch.empty(total)
    if kind == "int4":
        scales = torch.empty(blocks * 8 * words // 128, total, dtype=torch.float16)
        return GpuExpertStack(kind, experts, rows, depth, 128, StackTensors(codes, scales, None, row_scale, shift))
    exponents = torch.empty(blocks, total, dtype=torch.int32)
    return GpuExpertStack(kind, experts, rows, depth, 32, StackTensors(codes, exponents, None, row_scale, shift))


MODELS = {  # hidden, inner, experts (of which a few stand for all), experts per token, kinds, biases and clamping
    "qwen3-30b": (2048, 768, 128, 8, ("bf16", "fp8", "int4"), False),
    "deepseek-v2-lite": (2048, 1408, 64, 6, ("bf16",), False),
    "gpt-oss-20b": (2880, 2880, 32, 4, ("mxfp4",), True),
}


def _layers() -> Iterator[tuple[str, Any, int]]:
    from tokenmill.kernels.triton.experts.layer import GpuExperts

    for model, (hidden, inner, experts, top_k, kinds, clamped) in MODELS.items():
        spec = SimpleNamespace(
            experts_per_token=top_k,
            score="softmax_of_selected" if clamped else "softmax",
            normalize=True,
            scale=1.0,
            num_groups=1,
            top_groups=1,
            group_score="max",
            correction_bias=None,
            activation="silu",
            clamp=7.0 if clamped else 0.0,
            weights_on_input=False,
        )
        for kind in kinds:
            gate_up = _stack(kind, experts, 2 * inner, hidden, clamped, True)
            down = _stack(kind, experts, hidden, inner, clamped, False)
            yield f"{model} {kind}", GpuExperts(gate_up, down, spec), experts


def _unwritten_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """In the place of torch.bmm."""
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2]) if out is None else out


Case = tuple[str, Callable[[], object]]


def _expert_cases(all_candidates: bool) -> Iterator[Case]:
    from tokenmill.kernels.triton.experts.choose import candidates, rule

    for name, layer, experts in _layers():
        top_k, kind, inner = layer.spec.experts_per_token, layer.gate_up.kind, layer.down.depth
        for tokens in TOKENS:
            x = torch.empty(tokens, layer.gate_up.depth, dtype=torch.bfloat16)
            ids, weights = torch.empty(tokens, top_k, dtype=torch.int32), torch.empty(tokens, top_k)
            yield f"{name} {tokens}", partial(layer, x, torch.empty(tokens, experts))
            for plan in candidates(kind, experts, top_k, tokens, inner) if all_candidates else ():
                yield f"{name} {tokens} {plan.tokens} {plan.gate_up}", partial(layer.multiply, x, ids, weights, plan)
        for tokens in (1, 256):  # experts in host memory: of those that lie in slots, beside others
            x = torch.empty(tokens, layer.gate_up.depth, dtype=torch.bfloat16)
            ids, weights = torch.empty(tokens, top_k, dtype=torch.int32), torch.empty(tokens, top_k)
            rows = torch.empty(tokens * top_k, layer.down.rows, dtype=torch.bfloat16)
            plan = rule("mixed", experts, top_k, tokens, inner)
            yield f"{name} host {tokens}", partial(layer.multiply_some, x, ids, weights, plan, rows)


STEPS = {  # tokens of each sequence
    "decode 1": [1],
    "decode 64": [1] * 64,
    "decode 512": [1] * 512,
    "mixed": [1, 200, 1, 1500],
}


def _batch(counts: list[int], page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Table of pages, first rows and lengths of a step over sequences of 2,048 tokens."""
    table = torch.zeros(len(counts), 2048 // page_size, dtype=torch.int32)
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return table, starts, torch.full((len(counts),), 2048, dtype=torch.int32)


def _attention_cases() -> Iterator[Case]:
    """GPT-OSS: sinks, every other layer with a window."""
    from tokenmill.kernels.triton.attention.dense import SharedPrefixes, paged_attention

    heads, kv_heads, head_dim, page_size = 64, 8, 64, 16
    sinks, scales = torch.empty(heads), (torch.empty(kv_heads), torch.empty(kv_heads))
    for dtype, window in itertools.product((torch.bfloat16, torch.float8_e4m3fn), (0, 128)):
        pages = torch.empty(4, kv_heads, page_size, head_dim, dtype=dtype)
        keywords = {"sinks": sinks, "scales": None if dtype == torch.bfloat16 else scales}
        for step, counts in STEPS.items():
            q = torch.empty(sum(counts), heads * head_dim, dtype=torch.bfloat16)
            call = partial(paged_attention, q, pages, pages, *_batch(counts, page_size), 0.1, window, **keywords)
            yield f"sinks {dtype} {window} {step}", call
        q = torch.empty(8, heads * head_dim, dtype=torch.bfloat16)
        for runs in (1, 64) if not window else ():
            shared = SharedPrefixes(torch.zeros(runs, 3, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), 1024)
            arguments = (q, pages, pages, *_batch([1] * 8, page_size), 0.1)
            yield f"sinks {dtype} shared {runs}", partial(paged_attention, *arguments, shared=shared, **keywords)


def _prefix_cases() -> Iterator[Case]:
    """Llama-3.1-8B: many prefixes in one step; thresholds of sampling."""
    from tokenmill.kernels.triton.attention.dense import SharedPrefixes, paged_attention
    from tokenmill.kernels.triton.step.thresholds import search

    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        pages = torch.empty(4, 8, 16, 128, dtype=dtype)
        scales = None if dtype == torch.bfloat16 else (torch.empty(8), torch.empty(8))
        runs, tokens = torch.zeros(64, 3, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
        arguments = (torch.empty(256, 4096, dtype=torch.bfloat16), pages, pages, *_batch([1] * 256, 16), 0.1)
        call = partial(paged_attention, *arguments, shared=SharedPrefixes(runs, tokens, 16384), scales=scales)
        yield f"prefixes {dtype}", call
    for dtype in (torch.bfloat16, torch.float32):
        ones = torch.empty(64)
        logits, top_k = torch.empty(64, 128256, dtype=dtype), torch.empty(64, dtype=torch.int32)
        yield f"sampling {dtype}", partial(search, logits, ones, top_k, ones, ones)


def _latent_cases() -> Iterator[Case]:
    """DeepSeek-V2-Lite."""
    from tokenmill.kernels.triton.attention.latent import latent_inputs, latent_paged_attention

    heads, rank, nope, rope, value, page_size = 16, 512, 128, 64, 128, 16
    keys, values = (torch.empty(heads, width, rank, dtype=torch.bfloat16) for width in (nope, value))
    angles = torch.empty(2048, rope // 2)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        pages = torch.empty(4, 1, page_size, rank + rope, dtype=dtype)
        by = None if dtype == torch.bfloat16 else torch.ones(1)
        q, kv = (torch.empty(8, width, dtype=torch.bfloat16) for width in (heads * (nope + rope), rank + rope))
        inputs = (q, kv, torch.empty(rank, dtype=torch.bfloat16), 1e-6, pages)
        places = torch.zeros(8, dtype=torch.int64)
        for interleaved in (True, False):
            call = partial(latent_inputs, *inputs, places, places, angles, angles, interleaved, heads, by)
            yield f"latent {dtype} inputs {interleaved}", call
        for step, counts in STEPS.items():
            q, tails = (torch.empty(sum(counts), heads * width, dtype=torch.bfloat16) for width in (nope + rope, rope))
            arguments = (q, tails, keys, values, pages, *_batch(counts, page_size), 0.1)
            yield f"latent {dtype} {step}", partial(latent_paged_attention, *arguments, row_scale=by)


def _linear_cases() -> Iterator[Case]:
    """Qwen3-30B-A3B in float8: projections of attention; the router."""
    from tokenmill.kernels.triton.matmul.blocks import BlockLinear
    from tokenmill.kernels.triton.matmul.make import make_router

    for rows, depth in ((5120, 2048), (2048, 4096)):
        linear = BlockLinear(
            torch.empty(rows, depth, dtype=torch.float8_e4m3fn), torch.empty(rows // 128, depth // 128), None
        )
        for tokens in TOKENS:
            yield f"blocks {rows} {tokens}", partial(linear.multiply, torch.empty(tokens, depth, dtype=torch.bfloat16))
    router = make_router(torch.empty(128, 2048, dtype=torch.bfloat16), None)
    assert router is not None
    for tokens in (1, 4, 16, 64, 256):
        yield f"router {tokens}", partial(router.multiply, torch.empty(tokens, 2048, dtype=torch.bfloat16))


RECURRENT = (  # op, widths of its rows, shape of a state, arguments after states and places
    ("convolve", (8448,), (3, 8448), (torch.empty(4, 8448), torch.empty(8448))),
    ("mamba_scan", (8192, 8192, 16, 16), (8192, 16), (torch.empty(8192, 16), torch.empty(8192))),
    ("mamba2_scan", (8448, 128), (128, 64, 128), (torch.empty(128), torch.empty(128), torch.empty(128), 1)),
    ("delta_scan", (8192, 32, 32), (32, 128, 128), (torch.empty(32), torch.empty(32), 16)),
)


def _recurrent_cases() -> Iterator[Case]:
    """Bamba, Qwen3-Next and Jamba: decode steps of few and many rows, prompts."""
    from tokenmill.kernels import triton as gpu

    for op, widths, state, arguments in RECURRENT:
        for tokens, sequences in ((1, 1), (256, 256), (2048, 1), (2048, 63)):
            rows = [torch.empty(tokens, width, dtype=torch.bfloat16) for width in widths]
            places = torch.empty(sequences, dtype=torch.int64), torch.empty(sequences + 1, dtype=torch.int32)
            call = partial(getattr(gpu, op), *rows, torch.empty(1, *state), *places, *arguments)
            yield f"recurrent {op} {state[-1]} {tokens} {sequences}", call
            if op in ("mamba2_scan", "delta_scan") and tokens == 1:
                width = widths[0]
                convolution = gpu.Convolution(torch.empty(1, 3, width), torch.empty(4, width), torch.empty(width))
                yield f"recurrent {op} {state[-1]} convolved", partial(call, convolution=convolution)
    for weight in (torch.empty(1, 8192), torch.empty(128)):
        x = torch.empty(64, 8192, dtype=torch.bfloat16)
        yield "recurrent gated_norm", partial(gpu.gated_norm, x, x, weight, 1e-5, weight.dim() == 1)


def _adapter_cases() -> Iterator[Case]:
    """Eight slots of rank 16 and 64 on Llama 3 8B: the products of a layer, decodes and prompts."""
    from tokenmill.kernels.triton.adapters import products

    layer = {
        "qkv": ([4096, 1024, 1024], 4096),
        "o": ([4096], 4096),
        "gate": ([14336] * 2, 4096),
        "down": ([4096], 14336),
    }
    for name, (widths, depth) in layer.items():
        for rank, tokens in itertools.product((16, 64), (1, 16, 64, 2048)):
            columns, parts = sum(widths), len(widths)
            factors = products.Factors(
                torch.empty(8, parts, rank, depth, dtype=torch.bfloat16),
                torch.empty(8, columns, rank, dtype=torch.bfloat16),
                *(torch.empty(8, parts, dtype=torch.int32), torch.empty(8, columns), None),
                *(torch.empty(8, parts, dtype=torch.int32), products.make_tiles(widths, torch.device("cpu"))[0]),
            )
            x, y = (torch.empty(tokens, width, dtype=torch.bfloat16) for width in (depth, columns))
            slots = torch.zeros(tokens, dtype=torch.int32)
            yield f"adapters {name} {rank} {tokens} shrink", partial(products.shrink, x, slots, factors)
            call = partial(products.expand, y, slots, factors, (torch.empty(1), 4), range(len(factors.tiles)))
            yield f"adapters {name} {rank} {tokens} expand", call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every candidate of the chooser")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    driver.set_active(Hopper())
    launch.uses_pdl = lambda _device: True  # before the kernels' modules import them
    launch.on_hopper = lambda: True  # type: ignore[assignment]
    launch.gluon_options = lambda _device, warps: {"num_warps": warps, "launch_pdl": True}
    launch.num_processors = lambda _device: 132  # type: ignore[assignment]
    launch.options = lambda _device, warps=4, stages=3: {  # type: ignore[assignment]
        "num_warps": warps,
        "num_stages": stages,
        "launch_pdl": True,
    }
    # Nothing is computed here, and bf16 takes long on most CPUs.
    torch.bmm = _unwritten_product
    compilation = Compilation()
    JITFunction.run = lambda self, *args, **keywords: compilation(self, *args, **keywords)
    print(f"Triton {triton.__version__}")
    attention = (_attention_cases(), _prefix_cases(), _latent_cases())
    linears = (_linear_cases(), w4a8_cases(), float16_cases(STEPS, _batch))
    others = (*attention, *linears, packed_cases(_batch), _recurrent_cases())
    for name, call in itertools.chain(_expert_cases(options.all), *others, _adapter_cases()):
        if all(part in name for part in options.names):
            compilation.case = name
            call()
    print(f"{compilation.count} kernels, {compilation.failures} failures")
    sys.exit(1 if compilation.failures else 0)


if __name__ == "__main__":
    main()
