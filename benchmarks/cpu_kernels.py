"""Each linear kernel of this CPU against its floor: memory bandwidth for one row, the integer peak for many.

    python benchmarks/cpu_kernels.py [--types Q4_0,Q8_0,INT8] [--shape 4096x1024] [--rows 1,16,256]

Weights are cold (several copies are cycled through). Both limits are measured in the same run. Not a test.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from tokenmill.kernels import cpu
from tokenmill.kernels.ggml_types import TYPES

_COLD_BYTES = 96 << 20


def packed(kind: str, rows: int, cols: int, generator: torch.Generator) -> object:
    """A random weight; INT8 has one scale per output channel, INT2 to INT6 one per 128 columns."""
    module = cpu.module()
    if kind == "INT8":
        codes = torch.randint(-127, 128, (rows, cols), dtype=torch.int8, generator=generator)
        return module.PackedLinear.int8(codes, torch.full((rows, 1), 0.01))
    if kind.startswith("INT"):
        bits = int(kind.removeprefix("INT"))
        size = (256, cols // 2) if bits == 4 else (2**bits, cols)
        codes = torch.randint(0, size[0], (rows, size[1]), dtype=torch.uint8, generator=generator)
        return module.PackedLinear.grouped(codes, torch.full((rows, cols // 128), 0.01), None, None, bits)
    if kind in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        data = torch.randn(rows, cols, generator=generator).to(dtype).view(torch.uint8)
    else:
        values, size = TYPES[kind].block_size, TYPES[kind].block_bytes
        data = torch.randint(0, 64, (rows, cols // values * size), dtype=torch.uint8, generator=generator)
    return module.PackedLinear(kind, data, rows, cols)


def median_seconds(copies: list, x: torch.Tensor, seconds: float) -> float:
    module, pool = cpu.module(), cpu.pool()
    y = torch.empty(x.shape[0], copies[0].rows)
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - began < seconds:
        weight = copies[len(times) % len(copies)]
        start = time.perf_counter()
        module.linear(pool, x, [weight], [None], [y])
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="F16,Q4_0,Q4_1,Q5_0,Q8_0,Q4_K,Q6_K,INT4,INT8")
    parser.add_argument("--shape", default="4096x1024", help="outputs x inputs")
    parser.add_argument("--rows", default="1,4,16,64,256,512")
    parser.add_argument("--seconds", type=float, default=0.4, help="time spent on each figure")
    arguments = parser.parse_args()
    rows, cols = map(int, arguments.shape.split("x"))
    bandwidth = cpu.module().read_bandwidth(cpu.pool(), 256 << 20)
    peak = cpu.module().int8_peak(cpu.pool())
    print(f"{cpu.instruction_set()}, {cpu.num_threads()} threads: reads {bandwidth / 1e9:.1f} GB/s, ", end="")
    print(f"{peak / 1e9:.0f} GOP/s of int8; {rows}x{cols}, share of the floor in brackets")
    generator = torch.Generator().manual_seed(1)
    for kind in arguments.types.split(","):
        copies = [packed(kind, rows, cols, generator)]
        while sum(each.nbytes for each in copies) < _COLD_BYTES:
            copies.append(packed(kind, rows, cols, generator))
        line = [f"{kind:6}"]
        for count in map(int, arguments.rows.split(",")):
            seconds = median_seconds(copies, torch.randn(count, cols, generator=generator), arguments.seconds)
            read, done = copies[0].nbytes / seconds, 2.0 * count * rows * cols / seconds
            if count == 1:
                line.append(f"m=1 {read / 1e9:5.1f} GB/s [{read / bandwidth:.0%}]")
            else:
                line.append(f"m={count} {done / 1e9:4.0f} [{done / peak:.0%}]")
        print("  ".join(line), flush=True)


if __name__ == "__main__":
    main()
